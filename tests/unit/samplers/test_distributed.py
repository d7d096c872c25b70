"""One rank's share of the global order: joined in rank order, the ranks' batches are one rank's large batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.base.events import PositionedIndex
from asyncloader.base.topology import Topology
from asyncloader.samplers.distributed import BATCH_STRIDE, OnUneven, RankView, Share, Tail, tail_of
from asyncloader.samplers.seeded import SeededSampler

EVEN: tuple[OnUneven, ...] = ("drop", "pad", "repeat")


class Seekable:
    """Items that can be sought; counts the items that were produced."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.produced = 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[Any]:
        if not 0 <= start <= len(self.items):
            raise ValueError(f"start={start}")
        return self._from(start)

    def _from(self, start: int) -> Iterator[Any]:
        for item in self.items[start:]:
            self.produced += 1
            yield item


class Unsized:
    """Items without a length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


KINDS = {"sized": list, "seekable": Seekable, "unsized": Unsized}


def share(batch_size: int | None, ranks: int = 1, rank: int = 0, rule: OnUneven = "drop", **more: Any) -> Share:
    return Share(batch_size, more.pop("drop_last", False), Topology(rank, ranks), rule, **more)


def views(sampler: Any, batch_size: int | None, ranks: int, rule: OnUneven, **more: Any) -> list[RankView]:
    return [RankView(sampler, share(batch_size, ranks, rank, rule, **more)) for rank in range(ranks)]


def steps(view: RankView) -> list[Any]:
    """The view's steps, without the call of `len` that ``list(view)`` makes."""
    return [*view.iter_from(0)]


def joined(shares: list[list[PositionedIndex]]) -> list[list[Any]]:
    """For each step the ranks' batches, one after the other."""
    return [list(itertools.chain.from_iterable(placed.index for placed in step)) for step in zip(*shares, strict=True)]


sizes = st.integers(0, 40)
batches = st.integers(1, 5)
worlds = st.integers(1, 5)
kinds = st.sampled_from(sorted(KINDS))


@given(sizes, batches, worlds, st.sampled_from(EVEN), st.booleans(), kinds)
def test_ranks_together_are_one_rank_with_a_large_batch(
    size: int, batch_size: int, ranks: int, rule: OnUneven, drop_last: bool, kind: str
) -> None:
    """The full steps are the single rank's batches; only the last, incomplete step depends on `on_uneven`."""
    items = [100 + i for i in range(size)]
    all_views = views(KINDS[kind](items), batch_size, ranks, rule, drop_last=drop_last)
    together = joined([steps(view) for view in all_views])
    stride = batch_size * ranks
    alone = [placed.index for placed in steps(RankView(items, share(stride, drop_last=drop_last)))]
    full, left = divmod(size, stride)
    assert together[:full] == alone[:full]
    tail = tail_of(left, share(batch_size, ranks, 0, rule, drop_last=drop_last))
    rest = items[full * stride :]
    if not tail.each:
        assert len(together) == full
        assert tail.dropped == left
    else:
        (last,) = together[full:]
        expected = list(itertools.islice(itertools.cycle(rest), left - tail.dropped + tail.repeated))
        assert last == expected
        assert len(last) == tail.each * ranks
    for view in all_views:
        assert view.tail()[1:] == tail[1:]
        if kind != "unsized":
            assert len(view) == len(together)
            assert view.tail() == tail


@given(sizes, batches, worlds, st.sampled_from(EVEN))
def test_seeded_orders_are_shared_out_like_any_other(size: int, batch_size: int, ranks: int, rule: OnUneven) -> None:
    """A computed share equals the share that is cut from the whole order, positions and tail included."""
    sampler = SeededSampler(range(size), seed=3)
    for computed, plain in zip(
        views(sampler, batch_size, ranks, rule), views(list(sampler), batch_size, ranks, rule), strict=True
    ):
        assert steps(computed) == steps(plain)
        assert computed.cutter.padding == plain.cutter.padding
        assert (computed.cutter.dropped, computed.cutter.repeated) == (plain.cutter.dropped, plain.cutter.repeated)


@given(sizes, st.one_of(st.none(), batches), worlds, st.sampled_from(EVEN), kinds, st.data())
def test_iteration_goes_on_at_any_step(
    size: int, batch_size: int | None, ranks: int, rule: OnUneven, kind: str, data: st.DataObject
) -> None:
    """`iter_from(k)` is the rest of the epoch after k steps, positions included."""
    rank = data.draw(st.integers(0, ranks - 1))
    sampler = SeededSampler(range(size), 1) if data.draw(st.booleans()) else KINDS[kind](list(range(size)))
    view = RankView(sampler, share(batch_size, ranks, rank, rule))
    whole = steps(view)
    first = data.draw(st.integers(0, len(whole)))
    assert [*view.iter_from(first)] == whole[first:]


@given(sizes, batches, worlds, st.sampled_from(EVEN), st.booleans())
def test_positions_are_unique_over_all_ranks(
    size: int, batch_size: int, ranks: int, rule: OnUneven, of_batches: bool
) -> None:
    """No two samples of an epoch have the same position; a sample that is not repeated has its place as position."""
    items: list[Any] = [[i, i] for i in range(size)] if of_batches else list(range(size))
    found: list[int] = []
    for view in views(items, None if of_batches else batch_size, ranks, rule, of_batches=of_batches):
        for first, batch in steps(view):
            positions = [first + i for i in range(len(batch))]
            found += positions
            if not of_batches:
                assert all(position == i for position, i in zip(positions, batch, strict=True) if position < size)
            elif first // BATCH_STRIDE < size:
                assert batch == items[first // BATCH_STRIDE]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("of_batches", [False, True])
def test_positions_are_unique_where_the_sampler_shards(of_batches: bool) -> None:
    """Ranks whose sampler gives each its own items have distinct positions, too."""
    found: list[int] = []
    for replica in range(3):
        rules = share(None if of_batches else 2, of_batches=of_batches, replicas=3, replica=replica)
        view = RankView([[0, 1], [2, 3]] if of_batches else [0, 1, 2, 3], rules)
        for first, batch in steps(view):
            found += [first + i * (1 if of_batches else 3) for i in range(len(batch))]
    assert len(found) == 12
    assert len(set(found)) == 12


TAILS: dict[tuple[OnUneven, int], Tail] = {
    ("drop", 7): Tail(2, 1, 0),
    ("drop", 2): Tail(0, 2, 0),
    ("drop", 6): Tail(2, 0, 0),
    ("repeat", 7): Tail(3, 0, 2),
    ("repeat", 6): Tail(2, 0, 0),
    ("repeat", 1): Tail(1, 0, 2),
    ("pad", 7): Tail(4, 0, 5),
    ("pad", 6): Tail(4, 0, 6),
    ("error", 6): Tail(2, 0, 0),
    ("error", 0): Tail(0, 0, 0),
}


@pytest.mark.parametrize(("rule", "left"), TAILS)
def test_tail_by_rule(rule: OnUneven, left: int) -> None:
    """The last samples of three ranks with batches of four, by rule."""
    assert tail_of(left, share(4, 3, 0, rule)) == TAILS[rule, left]


def test_an_iterator_keeps_its_epoch() -> None:
    """The epoch is that of the moment at which the iterator was made, as with the sampler's own iterators."""
    sampler = SeededSampler(range(12), seed=1)
    view = RankView(sampler, share(2, 2, 0))
    expected = steps(view)
    iterator = view.iter_from(0)
    sampler.set_epoch(1)
    assert [*iterator] == expected


def test_a_trillion_samples_of_fifty_ranks() -> None:
    """In the middle of an epoch the ranks' parts are, joined, the order of a single process."""
    sampler, ranks, batch_size, first = SeededSampler(range(10**12), seed=7), 50, 32, 300_000_000
    found = [
        index
        for rank in range(ranks)
        for item in itertools.islice(RankView(sampler, share(batch_size, ranks, rank, "repeat")).iter_from(first), 2)
        for index in item.index
    ]
    stride = ranks * batch_size
    expected = sampler.order()(np.arange(first * stride, (first + 2) * stride))
    assert sorted(found) == sorted(expected.tolist())
