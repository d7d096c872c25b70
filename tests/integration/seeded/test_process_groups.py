"""Ranks that train together in real torch.distributed groups: equal numbers of batches, one state, and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.rank_group import RankGroup
from tests.helpers.ranks_script import Shard
from tests.helpers.remote_folders import make_shards
from tests.helpers.running import BOTH, run_async
from tests.helpers.seeded_datasets import AllDraws
from tests.helpers.seeded_runs import Stepwise, epochs_of
from tests.pairwise import quickly

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(3, tmp_path_factory.mktemp("three")) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the ranks keep no thread, no worker and no connection of a loader."""
    groups = [request.getfixturevalue(name) for name in ("two", "three") if name in request.fixturenames]
    yield
    for group in groups:
        if group.alive:
            assert group("left") == group.held


def steps_and_ends(ranks: list[list[Any]]) -> list[list[tuple[int, str]]]:
    """Of each rank's epochs: the number of batches, and the first words of the outcome."""
    return [[(len(batches), end.partition(":")[0]) for batches, end in rank] for rank in ranks]


# ------------------------------------------------------------------------------------- streams: the end together


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_end_together(two: RankGroup, kind: str, workers: int) -> None:
    """``on_uneven="drop"``: in each epoch every rank gets its first batches, as numerous as the shortest shard's."""
    ranks = two("stream", [9, 6], kind=kind, epochs=3, num_workers=workers, persistent_workers=bool(workers))
    steps = 4 if workers else 3  # rank 1's two workers with three samples each make two batches each
    assert steps_and_ends(ranks) == [[(steps, "end")] * 3] * 2
    for rank, epochs in enumerate(ranks):
        alone = [b.tolist() for b in epochs_of("sync", Shard(rank, [9, 6][rank]), batch_size=2, num_workers=workers)[0]]
        assert [batches for batches, _ in epochs] == [alone[:steps]] * 3


@pytest.mark.thorough
def test_three_ranks_train_while_their_loaders_run_ahead(three: RankGroup) -> None:
    """The loader's reductions never meet the trainer's, which run in the default group at the same time."""
    ranks = three("stream", [90, 61, 80], epochs=2, num_workers=2, train=True, prefetch_factor=4)
    assert steps_and_ends(ranks) == [[(31, "end")] * 2] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_each_group_has_the_whole_stream(three: RankGroup, workers: int, tmp_path: Path) -> None:
    """With `group`, ranks 0 and 2 share the shards and end together, and rank 1 reads all shards alone."""
    url = make_shards(tmp_path, (9, 4, 12, 7))
    first, alone, third = three("grouped", url, [[0, 2], [1]], epochs=2, num_workers=workers)
    assert [sorted(n for batch in batches for n in batch) for batches, _ in alone] == [list(range(32))] * 2
    for ours, theirs in zip(first, third, strict=True):
        assert (ours[1], theirs[1], len(ours[0])) == ("end", "end", len(theirs[0]))
        samples = [n for batches, _ in (ours, theirs) for batch in batches for n in batch]
        assert len(samples) == len(set(samples)) > 20


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_are_an_error_on_request(three: RankGroup, kind: str, workers: int) -> None:
    """``on_uneven="error"``: every rank raises, at the same step, in each epoch; with even shards no rank does."""
    ranks = three("stream", [8, 8, 16], kind=kind, epochs=2, num_workers=workers, on_uneven="error")
    assert steps_and_ends(ranks) == [[(4, "RanksDisagree")] * 2] * 3
    assert "rank 0 has 4 batches in this epoch and rank 2 has more" in ranks[0][0][1]
    ranks = three("stream", [8, 8, 8], kind=kind, num_workers=workers, on_uneven="error")
    assert steps_and_ends(ranks) == [[(4, "end")]] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_known_lengths_are_agreed_on_once(two: RankGroup, kind: str, workers: int) -> None:
    """Shards that know their lengths: the least length holds for all ranks; as an error, before the first batch."""
    options: dict[str, Any] = {"kind": kind, "epochs": 2, "num_workers": workers, "shard": "sized"}
    assert steps_and_ends(two("stream", [9, 5], **options)) == [[(3, "end")] * 2] * 2
    ranks = two("stream", [9, 5], on_uneven="error", **options)
    assert steps_and_ends(ranks) == [[(0, "RanksDisagree")] * 2] * 2
    assert "rank 1 has 3 batches in this epoch and rank 0 has 5" in ranks[0][0][1]
    # A rank that leaves hinders no other: there is no further reduction.
    assert steps_and_ends(two("stream", [9, 9], leave_at={1: 2}, **options)) == [[(5, "end")] * 2, [(2, "left")] * 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_is_too_long_is_named(two: RankGroup, workers: int) -> None:
    """The rank whose stream ends before its promise raises; the other rank gets all batches promised."""
    ranks = two("stream", [10, 6], shard="sized", promised=[10, 10], num_workers=workers)
    assert steps_and_ends(ranks) == [[(5, "end")], [(3, "RanksDisagree")]]
    assert "promised 5 batches or more, but its stream ended after 3" in ranks[1][0][1]


# ------------------------------------------------------------------------------- streams: one rank fails or leaves


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_dataset_ends_the_epoch_of_all(three: RankGroup, kind: str, workers: int) -> None:
    """The rank with the error raises it, the others raise RanksDisagree at the same step; also in the next epoch."""
    ranks = three("stream", [40, 40, 40], kind=kind, epochs=2, num_workers=workers, fail_at={1: 5})
    steps = 3 if workers else 2
    assert steps_and_ends(ranks) == [
        [(steps, "ArithmeticError" if rank == 1 else "RanksDisagree")] * 2 for rank in range(3)
    ]
    assert f"another rank's loader failed at step {steps}" in ranks[0][0][1]


@pytest.mark.parametrize("kind", BOTH)
def test_a_dead_worker_ends_the_epoch_of_all(two: RankGroup, kind: str) -> None:
    """A worker is killed: its rank raises WorkerDied, the other rank RanksDisagree."""
    ranks = two("stream", [40, 40], kind=kind, num_workers=2, die_at={0: 4})
    assert [[end for _, end in rank] for rank in steps_and_ends(ranks)] == [["WorkerDied"], ["RanksDisagree"]]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_leaves_is_missed(two: RankGroup, kind: str, workers: int, steps: int) -> None:
    """A rank drops its iterator, even before its first batch: the others raise; the next epoch is complete."""
    options: dict[str, Any] = {"kind": kind, "num_workers": workers, "persistent_workers": bool(workers)}
    ranks = two("stream", [40, 40], epochs=2, leave_at={1: steps}, leaves=1, **options)
    (missed, end), rest = ranks[0][0], steps_and_ends(ranks)
    assert steps <= len(missed) <= steps + 8, "what was agreed on ahead still comes"
    assert end.startswith("RanksDisagree: another rank left the epoch before step")
    assert [rank[1] for rank in rest] == [(20, "end")] * 2
    assert rest[1][0] == (steps, "left")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_may_leave(three: RankGroup, kind: str, workers: int) -> None:
    """All ranks break at the same step, again and again: no rank raises, and the next epoch is complete."""
    options: dict[str, Any] = {"kind": kind, "num_workers": workers, "persistent_workers": bool(workers)}
    ranks = three("stream", [60, 58, 62], epochs=5, leave_at={0: 3, 1: 3, 2: 3}, leaves=4, train=True, **options)
    steps = 30 if workers else 29
    assert steps_and_ends(ranks) == [[(3, "left")] * 4 + [(steps, "end")]] * 3


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_newer_iterator_takes_the_place_of_the_last(two: RankGroup, kind: str, workers: int) -> None:
    """A second iterator is made while the first is alive: the second is complete, and the first raises."""
    for steps, says in two("two_iterators", 40, kind=kind, num_workers=workers):
        assert steps == 20
        # Or the other rank's second iterator was made before, while the first iterator of this rank waited for a step.
        mine = "LoaderClosed: a newer iterator of this loader has replaced this one"
        assert says.startswith((mine, "RanksDisagree: another rank left the epoch")), says


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "workers"), quickly([("sync", 2), ("asyncio", 0)], ("sync", 2)))
def test_a_rank_that_is_killed(tmp_path: Path, kind: str, workers: int) -> None:
    """SIGKILL for one rank of three: the other two raise at once, also if the rank between them lives on."""
    with RankGroup(3, tmp_path) as group:
        group.ask("stream_until_killed", 2, 5, kind=kind, num_workers=workers)
        for (_, end), *more in group.answers(0, 1):
            assert end.startswith("RanksDisagree: the ranks could not agree on step"), end
            assert "another rank has ended" in end
            assert more[0][1].startswith("RanksDisagree"), "and the next epoch does not wait either"
        group.kill()


@pytest.mark.thorough
def test_a_rank_that_never_begins(tmp_path: Path) -> None:
    """The others do not wait for it for ever: they raise once the time to connect is over."""
    with RankGroup(2, tmp_path) as group:
        error, _ = group("never_begins", 1)
        assert error.startswith("RanksDisagree: the ranks could not be connected: another rank failed or left"), error


@pytest.mark.thorough
def test_a_process_may_end_though_the_others_go_on(tmp_path: Path) -> None:
    """A rank that left exits while the other rank keeps its iterator and requests nothing."""
    with RankGroup(2, tmp_path) as group:
        group("keep", 0, num_workers=0)
        group.end(1)
        group.end(0)


# ------------------------------------------------------------------------------------------ streams: conditions


def test_a_stream_on_ranks_needs_their_group() -> None:
    """Without a process group both loaders raise, and name the remedy."""
    options: dict[str, Any] = {"seed": 1, "rank": 0, "world_size": 2}
    with (
        DataLoader[Any](Shard(0, 4), **options) as loader,
        pytest.raises(RuntimeError, match=r"world_size=2 .* Call torch\.distributed\.init_process_group first"),
    ):
        iter(loader)

    async def run() -> None:
        async with AsyncDataLoader[Any](Shard(0, 4), num_workers=1, **options) as loader:
            aiter(loader)

    with pytest.raises(RuntimeError, match="init_process_group"):
        run_async(run())


def test_the_group_must_have_all_ranks(two: RankGroup) -> None:
    """A `world_size` other than the group's is an error that names both."""
    for ((_, end),) in two("stream", [4, 4], rank=0, world_size=3):
        assert end.startswith("RuntimeError: world_size=3, but torch.distributed has 2 ranks")


def test_torch_distributed_may_be_initialized_anew(two: RankGroup, tmp_path: Path) -> None:
    """A loader outlives torch.distributed's shutdown: its next epoch is agreed on in the new group."""
    assert two("anew", f"file://{tmp_path}/store") == [[4, 4]] * 2


# ----------------------------------------------------------------------------------------------- streams: state


@pytest.mark.parametrize("shard", ["unsized", "sized"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_stream_ends_together_too(two: RankGroup, shard: str, workers: int) -> None:
    """The rest of the epoch is that of an uninterrupted run on each rank, whether or not the length is known."""
    for whole, parts in two("stream_resumed", [13, 10], 2, shard, num_workers=workers):
        assert len(whole) == 5
        assert parts == whole


# ------------------------------------------------------------------------------------------------- map datasets


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_groups_ranks_share_the_order(three: RankGroup, kind: str, workers: int) -> None:
    """`rank` and `world_size` are torch.distributed's: the ranks' batches, joined, are those of a single rank."""
    options: dict[str, Any] = {"seed": 5, "shuffle": True, "num_workers": workers}
    ranks = three("mapped", 48, kind=kind, epochs=2, batch_size=4, **options)
    alone = epochs_of("sync", AllDraws(48), 2, batch_size=12, seed=5, shuffle=True)
    for epoch in range(2):
        steps = zip(*[found[epoch] for found, _, _ in ranks], strict=True)
        assert [list(chain(*step)) for step in steps] == [batch.tolist() for batch in alone[epoch]]


@pytest.mark.thorough
def test_a_run_goes_on_with_other_ranks(two: RankGroup, three: RankGroup) -> None:
    """Two ranks, then three, then one, with one global batch of 12: rank 0's state serves them all, and the joined
    batches are those of an uninterrupted run.
    """
    options: dict[str, Any] = {"seed": 8, "shuffle": True}
    expected = [batch.tolist() for batch in epochs_of("sync", AllDraws(90), batch_size=12, **options)[0]]
    got: list[Any] = []
    state = None
    for group, workers in ((two, 2), (three, 1), (two, 0)):
        ranks = group("mapped", 90, batch_size=12 // group.world, state=state, steps=2, num_workers=workers, **options)
        got += [list(chain(*step)) for step in zip(*[found[0] for found, _, _ in ranks], strict=True)]
        states = [given for _, _, given in ranks]
        assert all(given == states[0] for given in states), "the same on every rank"
        state = states[0]
    with Stepwise("sync", AllDraws(90), batch_size=12, **options) as run:
        run.loader.load_state_dict(state)
        got += [batch.tolist() for batch in run.epoch()]
    assert got == expected
