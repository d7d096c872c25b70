"""Ranks in seeded mode: joined in rank order they equal a single rank; samples that cannot be shared are counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from asyncloader import SeededSampler
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import AllDraws, AwaitedDraws, Lists, Rows, WholeDraws
from tests.helpers.seeded_runs import Stepwise, epochs_of, joined

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def ranks_of(kind: str, dataset: Any, world: int, epochs: int = 1, **options: Any) -> list[list[list[Any]]]:
    """Each rank's epochs, from loaders of this process, one after the other."""
    return [epochs_of(kind, dataset, epochs, rank=r, world_size=world, **options) for r in range(world)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "workers", "make"),
    [("sync", 0, AllDraws), ("sync", 2, AwaitedDraws), ("asyncio", 2, AllDraws), ("asyncio", 0, AwaitedDraws)],
)
def test_ranks_joined_are_one_rank(kind: str, workers: int, make: Any) -> None:
    """1, 2, 4 and 8 ranks with the same global batch: at each step their batches, joined, are the same bytes."""
    options: dict[str, Any] = {"shuffle": True, "seed": 11}
    expected = epochs_of("sync", make(48), 2, batch_size=8, **options)
    for world in (1, 2, 4, 8):
        ranks = ranks_of(kind, make(48), world, 2, batch_size=8 // world, num_workers=workers, **options)
        for number in range(2):
            assert_same(joined([rank[number] for rank in ranks]), expected[number])


def test_a_datasets_whole_batches_are_not_promised_across_ranks_but_repeat() -> None:
    """A dataset's own `__getitems__` is seeded by the batch: the numbers repeat for the same number of ranks."""
    one = ranks_of("sync", WholeDraws(24), 2, batch_size=4, seed=5)
    assert_same(ranks_of("asyncio", WholeDraws(24), 2, batch_size=4, seed=5, num_workers=2), one)
    assert_same(
        [batch[:, 0] for batch in joined([rank[0] for rank in one])],
        [batch[:, 0] for batch in epochs_of("sync", WholeDraws(24), batch_size=8, seed=5)[0]],
    )


# ------------------------------------------------------------------------------------------- the tail


def shares_of(left: list[int], world: int, size: int, rule: str) -> list[list[int]]:
    """Each rank's share of the items after the last full global batch."""
    each = {"drop": len(left) // world, "repeat": -(-len(left) // world), "pad": size if left else 0}[rule]
    filled = list(itertools.islice(itertools.cycle(left), each * world)) if left else []
    return [filled[rank * each : (rank + 1) * each] for rank in range(world)]


@pytest.mark.parametrize("rule", ["drop", "repeat", "pad"])
@pytest.mark.parametrize("length", range(7, 18))
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_tail(rule: str, length: int, world: int) -> None:
    """The rules for the items after the last full global batch: equal numbers of batches, and exact counts."""
    size = 2
    order = list(SeededSampler(range(length), 3))
    full = length // (size * world) * size * world
    left = order[full:]
    shares = shares_of(left, world, size, rule)
    batches = [(full // (size * world)) + bool(share) for share in shares]
    for rank in range(world):
        options: dict[str, Any] = {"rank": rank, "world_size": world, "on_uneven": rule, "seed": 3, "shuffle": True}
        with Stepwise("sync", Rows(length), batch_size=size, **options) as run:
            assert len(run.loader) == batches[rank]
            run.begin()
            paddings, got = [], []
            for _ in range(batches[rank]):
                got += run.step().tolist()
                paddings.append(run.loader.padding)
            with pytest.raises(StopIteration):
                run.step()
            mine = [order[i] for i in range(full) if i // size % world == rank]
            assert got == [*mine, *shares[rank]]
            places = range(rank * len(shares[rank]), (rank + 1) * len(shares[rank]))
            filling = sum(place >= len(left) for place in places)
            assert paddings == [0] * (full // (size * world)) + ([filling] if shares[rank] else [])
            given = sum(map(len, shares))
            stats = run.loader.stats()
            assert stats["data/dropped_samples"] == max(0, len(left) - given)
            assert stats["data/repeated_samples"] == max(0, given - len(left))
            run.epoch()
            assert run.loader.stats()["data/repeated_samples"] == 2 * max(0, given - len(left)), "of both epochs"
            assert run.loader.stats()["data/dropped_samples"] == 2 * max(0, len(left) - given)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_padding_with_workers(kind: str, workers: int) -> None:
    """`padding` is that of the batch delivered last, whatever was fetched ahead."""
    options: dict[str, Any] = {"rank": 1, "world_size": 2, "on_uneven": "pad", "seed": 3, "num_workers": workers}
    with Stepwise(kind, Rows(13), batch_size=2, **options) as run:
        assert run.loader.padding == 0
        for _ in range(2):
            run.begin()
            seen = []
            for _ in range(4):
                run.step()
                seen.append(run.loader.padding)
            assert seen == [0, 0, 0, 2]  # 1 of 4 is left, and rank 0 has it
            assert run.rest() == []
        assert run.loader.stats()["data/repeated_samples"] == 2 * 3


@pytest.mark.parametrize("kind", BOTH)
def test_an_uneven_tail_is_an_error_on_request(kind: str) -> None:
    """``on_uneven="error"`` raises, with the numbers and the remedy; an even tail is no error."""
    options: dict[str, Any] = {"batch_size": 2, "seed": 3, "on_uneven": "error", "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match=r"last 3 samples .* world_size=2 .* use on_uneven='drop'"):
        epochs_of(kind, Rows(11), **options)
    assert len(epochs_of(kind, Rows(10), **options)[0]) == 3
    assert len(epochs_of(kind, Rows(11), drop_last=True, **options)[0]) == 2
    del options["batch_size"]
    with pytest.raises(ValueError, match="last 1 batches"):
        epochs_of(kind, Rows(11), batch_sampler=Lists([[1], [2], [3]]), **options)


@pytest.mark.parametrize("kind", BOTH)
def test_an_unsized_sampler_is_shared_evenly_too(kind: str) -> None:
    """The rules hold where a sampler without a length ends, on every rank."""

    class Unsized:
        def __iter__(self) -> Any:
            return iter(range(11))

    for rule in ("drop", "repeat", "pad"):
        shares = shares_of([8, 9, 10], 2, 2, rule)
        for rank in range(2):
            with Stepwise(
                kind, Rows(11), batch_size=2, sampler=Unsized(), seed=1, rank=rank, world_size=2, on_uneven=rule
            ) as run:
                got = [batch.tolist() for batch in run.epoch()]
                assert got == [[2.0 * rank, 2.0 * rank + 1], [4 + 2.0 * rank, 5 + 2.0 * rank], shares[rank]]
                given = sum(map(len, shares))
                assert run.loader.stats()["data/dropped_samples"] == max(0, 3 - given)
                assert run.loader.stats()["data/repeated_samples"] == max(0, given - 3)


# ------------------------------------------------------------------------------------------- samplers that shard


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_a_distributed_sampler_is_not_sharded_again(workers: int) -> None:
    """torch's `DistributedSampler` gives each rank its part already: seeded mode keeps its order, advances its epoch,
    and makes the samples of the interleaved order.
    """
    world, length = 2, 21
    got: list[list[list[Any]]] = []
    for rank in range(world):
        sampler: Any = DistributedSampler(Rows(length), world, rank, seed=4)
        plain = torch.utils.data.DataLoader(Rows(length), batch_size=3, sampler=sampler)
        expected: list[Any] = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected.append(list(plain))
        sampler = DistributedSampler(Rows(length), world, rank, seed=4)
        options: dict[str, Any] = {"sampler": sampler, "rank": rank, "world_size": world, "num_workers": workers}
        got.append(epochs_of("sync", AllDraws(length), 2, batch_size=3, seed=9, **options))
        for ours, theirs in zip(got[-1], expected, strict=True):
            assert_same([batch[:, 0] for batch in ours], theirs)
    rows = [torch.cat(rank[0]) for rank in got]
    order = torch.stack(rows, dim=1).reshape(-1, rows[0].shape[1])
    whole = epochs_of("sync", AllDraws(length), batch_size=6, sampler=order[:, 0].int().tolist(), seed=9)[0]
    assert_same(order, torch.cat(whole))
