"""DistributedReadingService and `fullsync` with two ranks over gloo, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from asyncloader.dataloader2 import (
    DataLoader2,
    DistributedReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from asyncloader.dataloader2.adapter import FullSync, ShardingPolicy
from asyncloader.dataloader2.datapipes import PrefetchTimeoutError
from asyncloader.dataloader2.random import dist_share_seed
from asyncloader.errors import RanksDisagree
from tests.dataloader2.parts import MP, Seeded, Unreadable, fails_at_5, numbers

pytestmark = [pytest.mark.network]


def _rank(rank: int, store: str, body: Callable[[int], Any], answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        answers.send((rank, body(rank)))
    except BaseException as error:
        answers.send((rank, error))
    finally:
        dist.destroy_process_group()


def both(tmp_path: Path, body: Callable[[int], Any]) -> list[Any]:
    """Run a function in two ranks. Returns both results."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), body, pipes[rank][1])) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        for _, end in pipes:
            end.close()
        answers = dict(pipe.recv() for pipe, _ in pipes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
            process.join()
            process.close()
        for pipe, _ in pipes:
            pipe.close()
    for answer in answers.values():
        if isinstance(answer, BaseException):
            raise answer
    return [answers[0], answers[1]]


def _epochs(rank: int) -> Any:
    graph = Seeded(Seeded(numbers(21).shuffle()).sharding_filter())
    loader = DataLoader2[Any](graph, reading_service=DistributedReadingService(60))
    found = [list(loader), list(loader)]
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    found.append(list(loader))  # an epoch that was left at the same item everywhere
    loader.shutdown()
    return found


def test_two_ranks(tmp_path: Path) -> None:
    """Shares do not overlap, and end together; ranks share the seeds before the filter, and have own seeds after it."""
    zero, one = both(tmp_path, _epochs)
    for ours, theirs in zip(zero, one, strict=True):
        assert len(ours) == len(theirs) == 10
        assert len({x for ((x, _), _) in ours + theirs}) == 20
        (shared,) = {seed for ((_, seed), _) in ours + theirs}
        own = [{seed for (_, seed) in each} for each in (ours, theirs)]
        assert len(own[0]) == len(own[1]) == 1
        assert own[0] != own[1]
        assert shared


def _with_workers(rank: int) -> Any:
    found = []
    for graph in (
        numbers(24).shuffle().sharding_filter(),
        numbers(24).sharding_filter().sharding_round_robin_dispatch(MP),
        numbers(24).shuffle().sharding_round_robin_dispatch(MP).sharding_filter(),
    ):
        service = SequentialReadingService(DistributedReadingService(60), MultiProcessingReadingService(2, "fork"))
        with DataLoader2[int](graph, reading_service=service) as loader:
            iterator = iter(loader)
            for _ in range(5):
                next(iterator)
            found.append(list(loader))
            found.append(list(loader))
    return found


@pytest.mark.thorough
def test_two_ranks_with_two_workers_each(tmp_path: Path) -> None:
    """The ranks share the graph's items, and the workers of each rank the rank's share."""
    for ours, theirs in zip(*both(tmp_path, _with_workers), strict=True):
        assert len(ours) == len(theirs) == 12
        assert sorted(ours + theirs) == list(range(24))


def _uneven(rank: int) -> Any:
    loader = DataLoader2[int](numbers(5 + 7 * rank), FullSync(60))
    found = [list(loader), list(loader)]
    loader.shutdown()
    assert loader.datapipe is not None
    loader.datapipe.shutdown()
    return found


@pytest.mark.thorough
def test_fullsync_ends_with_the_shortest(tmp_path: Path) -> None:
    """In each epoch the rank with more items drops those for which the other rank has no item."""
    assert both(tmp_path, _uneven) == [[[0, 1, 2, 3, 4]] * 2] * 2


def _leaving(rank: int) -> Any:
    loader = DataLoader2[int](numbers(9), FullSync(60))
    try:
        iterator = iter(loader)
        for _ in range(2 + 2 * rank):
            next(iterator)
        return list(loader)
    except RanksDisagree as error:
        return str(error).partition(":")[0]
    finally:
        assert loader.datapipe is not None
        loader.datapipe.shutdown()


@pytest.mark.thorough
def test_ranks_that_leave_at_different_items(tmp_path: Path) -> None:
    """Both ranks raise `RanksDisagree`, instead of ending at different items."""
    assert both(tmp_path, _leaving) == ["the ranks are in different epochs, 1 to 2"] * 2


def _loaders(served: bool, rank: int) -> Any:
    counts = []
    for _ in range(4):
        service = DistributedReadingService(60) if served else None
        with DataLoader2[int](numbers(3), FullSync(60), reading_service=service) as loader:
            next(iter(loader))
        counts.append((len([*Path("/proc/self/fd").iterdir()]), threading.active_count()))
    dist.barrier()  # a rank that ended before the other has counted would close a connection of the other's
    return counts


@pytest.mark.thorough
@pytest.mark.parametrize("served", [False, True])
def test_groups_are_destroyed(tmp_path: Path, served: bool) -> None:
    """A loader destroys its process groups and ends its threads, with a reading service or without."""
    for counts in both(tmp_path, partial(_loaders, served)):
        assert counts[1] == counts[-1]
        assert counts[-1][1] == 1


def _failing(rank: int) -> Any:
    graph = numbers(9).map(fails_at_5) if rank else numbers(9)
    loader = DataLoader2[int](graph, reading_service=DistributedReadingService(60))
    found: list[Any] = []
    try:
        found.extend(loader)
    except ValueError as error:
        found.append(str(error).partition("\n")[0])
    loader.shutdown()
    return found


@pytest.mark.thorough
def test_an_error_in_one_rank_ends_the_others_epoch(tmp_path: Path) -> None:
    """The error is raised in that rank, and the other rank does not wait."""
    zero, one = both(tmp_path, _failing)
    assert zero == [0, 1, 2, 3, 4]
    assert one == [*range(5), "five is right out"]


def _cannot_begin(rank: int) -> Any:
    graph = numbers(9) if rank else Unreadable(ValueError)
    with DataLoader2[int](graph, reading_service=DistributedReadingService(60)) as loader:
        if rank:
            return list(loader)
        with pytest.raises(ValueError, match="cannot begin"):
            list(loader)
        return None


@pytest.mark.thorough
def test_an_epoch_that_cannot_begin_in_one_rank_ends_in_the_other(tmp_path: Path) -> None:
    """The other rank has no item, and no error of its connection."""
    assert both(tmp_path, _cannot_begin) == [None, []]


def _late(rank: int) -> Any:
    loader = DataLoader2[int](
        numbers(3) if rank else numbers(3).map(_waits), reading_service=DistributedReadingService(1)
    )
    try:
        return list(loader)
    except PrefetchTimeoutError as error:
        _get_default_store().set(f"late {rank}", "")
        return str(error).partition("\n")[0]
    finally:
        loader.shutdown()


def _waits(x: int) -> int:
    if x == 1:
        _get_default_store().wait(["late 0", "late 1"])
    return x


@pytest.mark.thorough
def test_a_rank_that_is_late(tmp_path: Path) -> None:
    """Both ranks raise PrefetchTimeoutError, with the documented message."""
    assert both(tmp_path, _late) == ["Fail to fetch data within 1 seconds"] * 2


def _policy(rank: int) -> Any:
    graph = numbers(6).sharding_filter()
    with DataLoader2[int](graph, ShardingPolicy(MP), DistributedReadingService(60)) as loader:
        return list(loader), dist_share_seed((1 << 64) - 1 - rank)


@pytest.mark.thorough
def test_sharding_among_workers_alone_and_a_shared_seed(tmp_path: Path) -> None:
    """With the workers' priority each rank reads everything; all ranks get rank 0's seed of 64 bits."""
    assert both(tmp_path, _policy) == [(list(range(6)), (1 << 64) - 1)] * 2


def test_without_torch_distributed() -> None:
    """The errors have the documented messages."""
    loader = DataLoader2[int](numbers(2), reading_service=DistributedReadingService())
    with pytest.raises(RuntimeError, match=r"^Torch Distributed is required to be initialized$"):
        iter(loader)
    with pytest.raises(RuntimeError, match=r"^Torch Distributed is required to be initialized to use `FullSync`"):
        list(numbers(2).fullsync())
    assert str(PrefetchTimeoutError(3)) == "Fail to fetch data within 3 seconds"
