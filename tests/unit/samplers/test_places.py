"""The places of a sample are where the ranks' batches have it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import BucketBatchSampler, SeededSampler
from asyncloader.ranks.topology import Topology
from asyncloader.samplers.distributed import RankView, Share
from asyncloader.state.single_steps import Place, places

RULES = st.sampled_from(["drop", "pad", "repeat"])


def read(sampler: Any, share: Share) -> Iterator[tuple[Any, Place]]:
    """Every index that the ranks get, with its place."""
    ranks = share.topology.world_size
    for rank in range(ranks):
        for step, item in enumerate(RankView(sampler, share._replace(topology=Topology(rank, ranks)))):
            for number, index in enumerate(item.index if isinstance(item.index, list) else [item.index]):
                yield index, Place(step, rank, number)


def check(sampler: Any, share: Share, indices: list[Any]) -> None:
    found = sorted((index, place) for index, place in read(sampler, share))
    for index in indices:
        assert places(sampler, share, index) == [place for each, place in found if each == index]


@given(st.integers(0, 60), st.none() | st.integers(1, 7), st.integers(1, 5), st.booleans(), RULES, st.booleans())
def test_indices(size: int, batch: int | None, ranks: int, drop_last: bool, rule: Any, shuffle: bool) -> None:
    """Of a computed order and of a user's, for every tail; an index that is not there has no place."""
    sampler = SeededSampler(range(size), 7, shuffle=shuffle)
    sampler.set_epoch(3)
    rules = Share(batch, drop_last and batch is not None, Topology(0, ranks), rule)
    check(sampler, rules, [*range(size), size, -1, "1", None])
    check([index % 5 for index in range(size)], rules, [*range(6)])


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5), RULES)
def test_batches(size: int, batch: int, ranks: int, rule: Any) -> None:
    """Of a batch sampler, whose batches the ranks share out."""
    sampler = BucketBatchSampler([1 + index % 9 for index in range(size)], batch, seed=2)
    check(sampler, Share(None, False, Topology(0, ranks), rule, of_batches=True), [*range(size + 1)])


@pytest.mark.parametrize("n", [10**12, 2**62])
def test_huge(n: int) -> None:
    """The place of a sample leads back to its index, among as many as there may be."""
    rules, sampler = Share(8, False, Topology(0, 4), "drop"), SeededSampler(range(n), 5)
    for index in itertools.islice(itertools.count(n // 3, 7919), 20):
        ((step, rank, number),) = places(sampler, rules, index)
        assert next(sampler.iter_from((step * 4 + rank) * 8 + number)) == index
