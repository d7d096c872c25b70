"""A rank of a group of processes that train together: serves its parent's requests.

Started by `rank_group.py`. A real torch.distributed group (gloo, on this machine) of 2 or 3 processes is shared by many
tests: each calls one of the functions below on all ranks, and gets each rank's result.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

from asyncloader import Recovery
from asyncloader.ranks import process_group
from asyncloader.ranks.process_group import destroy_unused
from tests.helpers.declared_ranks import Declared
from tests.helpers.fixed_ranks import Fixed
from tests.helpers.listing_ranks import Listing
from tests.helpers.package_tables import read_table
from tests.helpers.remote_folders import dataset_of, with_method
from tests.helpers.running import PATIENCE_S
from tests.helpers.seeded_datasets import AllDraws, Rows
from tests.helpers.seeded_runs import Stepwise
from tests.processes import own_children

Ended = tuple[list[list[float]], str]
"""An epoch's batches, and how it ended: "end", "left", or an error's type and text."""


class Shard(IterableDataset[Any]):
    """A rank's part of a stream: float64 scalars ``1000 * rank + i``, dealt to its workers in turn.

    Args:
        rank: of the process.
        length: samples.
        fail_at: number of the sample that raises, None for none.
        die_at: number of the sample at which the process is killed.
    """

    def __init__(self, rank: int, length: int, fail_at: int | None = None, die_at: int | None = None) -> None:
        self.rank = rank
        self.length = length
        self.fail_at = fail_at
        self.die_at = die_at

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.length, stride):
            if i == self.fail_at:
                raise ArithmeticError(f"sample {i} of rank {self.rank} is broken")
            if i == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.tensor(1000 * self.rank + i, dtype=torch.float64)


class SizedShard(Shard):
    """A shard with a length, which may be wrong: `promised`."""

    promised: int | None = None

    def __len__(self) -> int:
        return self.length if self.promised is None else self.promised


class Lengthless(Shard):
    """A shard with a ``__len__`` that raises, as torch's datapipes have."""

    def __len__(self) -> int:
        raise TypeError("this one has no length")


SHARDS = {"unsized": Shard, "sized": SizedShard, "lengthless": Lengthless}


class Place(Listing, Declared, Fixed):
    """This process's rank, with the functions that a test may call."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.kept: dict[str, Any] = {}
        self.runs: list[Stepwise] = []

    # -------------------------------------------------------------------------------------------- streams

    def _shard(self, lengths: list[int], shard: str, promised: list[int] | None, **broken: Any) -> Shard:
        arguments = {name: (at or {}).get(self.rank) for name, at in broken.items()}
        dataset = SHARDS[shard](self.rank, lengths[self.rank], **arguments)
        if isinstance(dataset, SizedShard) and promised is not None:
            dataset.promised = promised[self.rank]
        return dataset

    def stream(
        self,
        lengths: list[int],
        *,
        kind: str = "sync",
        epochs: int = 1,
        shard: str = "unsized",
        promised: list[int] | None = None,
        fail_at: dict[int, int] | None = None,
        die_at: dict[int, int] | None = None,
        leave_at: dict[int, int] | None = None,
        leaves: int | None = None,
        train: bool = False,
        **options: Any,
    ) -> list[Ended]:
        """Read epochs of a loader over this rank's shard. Returns the batches of each, and how it ended.

        Args:
            lengths: each rank's samples.
            kind: of loader, as for `Stepwise`.
            epochs: how many.
            shard: "unsized", "sized" or "lengthless".
            promised: the length that a sized shard reports, by rank.
            fail_at: sample that raises, by rank.
            die_at: sample that kills its process, by rank.
            leave_at: steps after which a rank drops its iterator.
            leaves: the number of epochs that a rank leaves at `leave_at`, from the first on; None: all.
            train: reduce over all ranks at each step, as a trainer does, and check the sum.
            options: the loader's.
        """
        dataset = self._shard(lengths, shard, promised, fail_at=fail_at, die_at=die_at)
        last = (leave_at or {}).get(self.rank)
        with Stepwise(kind, dataset, **{"batch_size": 2, "seed": 3, **options}) as run:
            return [
                self._epoch(run, last if leaves is None or epoch < leaves else None, train) for epoch in range(epochs)
            ]

    def _epoch(self, run: Stepwise, last: int | None, train: bool) -> Ended:
        got: list[list[float]] = []
        try:
            run.begin()
            while last is None or len(got) < last:
                batch = run.step()
                got.append(batch.tolist())
                if train:
                    one = torch.ones(1)
                    torch.distributed.all_reduce(one)
                    assert int(one) == self.world
        except StopIteration:
            return got, "end"
        except Exception as error:
            return got, f"{type(error).__name__}: {error}"
        run.iterator = None
        return got, "left"

    def shards(
        self,
        url: str,
        *,
        kind: str = "sync",
        epochs: int = 1,
        steps: int = 0,
        buffer: int = 0,
        cache_dir: str | None = None,
        workers: list[int] | None = None,
        **options: Any,
    ) -> list[Ended]:
        """Read epochs of a loader over shards of numbers in a store; with `steps`, one epoch, saved there and
        resumed. The text ``{rank}`` in `cache_dir` is replaced. `workers`: their number on each rank.
        """
        if workers is not None:
            options["num_workers"] = workers[self.rank]
        folder = None if cache_dir is None else cache_dir.format(rank=self.rank)
        dataset = dataset_of(url, shuffle_buffer=buffer, cache_dir=folder)
        options = with_method({"batch_size": 2, "seed": 3, **options})
        torch.manual_seed(1000 + self.rank)  # the ranks of a torch-mode run draw different numbers
        with Stepwise(kind, dataset, **options) as run:
            if not steps:
                return [self._epoch(run, None, False) for _ in range(epochs)]
            run.begin()
            head = [batch.tolist() for batch in run.take(steps)]
            state = run.loader.state_dict()
        with Stepwise(kind, dataset, **options) as run:
            run.loader.load_state_dict(state)
            batches, end = self._epoch(run, None, False)
            return [(head + batches, end)]

    def shards_and_dropped(
        self, url: str, *, epochs: int, buffer: int = 0, **options: Any
    ) -> tuple[list[Ended], float]:
        """Return the result of `shards`, and the number of samples that were counted as dropped."""
        torch.manual_seed(1000 + self.rank)
        with Stepwise("sync", dataset_of(url, shuffle_buffer=buffer), **with_method(options)) as run:
            return [self._epoch(run, None, False) for _ in range(epochs)], run.loader.stats()["data/dropped_samples"]

    def stream_until_killed(self, victim: int, steps: int, kind: str, **options: Any) -> list[Ended]:
        """Read two epochs like `stream`; the rank `victim` is killed after a number of steps."""
        with Stepwise(kind, Shard(self.rank, 400), batch_size=2, seed=3, **options) as run:
            if self.rank != victim:
                return [self._epoch(run, None, False) for _ in range(2)]
            run.begin()
            run.take(steps)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

    def keep(self, keeper: int, **options: Any) -> None:
        """Take two steps on each rank; `keeper` keeps its iterator as long as it lives, the other ranks drop theirs."""
        run = Stepwise("sync", Shard(self.rank, 400), batch_size=2, seed=3, **options)
        run.begin()
        run.take(2)
        if self.rank == keeper:
            self.runs.append(run)
        else:
            run.iterator = None

    def never_begins(self, absent: int) -> str:
        """Begin to read, but on the rank `absent`, with half a second to connect. Returns the error."""
        if self.rank == absent:
            return ""
        process_group._CONNECTING = timedelta(seconds=0.5)
        _get_default_store().set_timeout(timedelta(seconds=0.1))
        with Stepwise("sync", Shard(self.rank, 10), batch_size=2, seed=3, num_workers=0) as run:
            return self._epoch(run, None, False)[1]

    def two_iterators(self, length: int, kind: str, **options: Any) -> tuple[int, str]:
        """Read an epoch with a second iterator while the first lives. Returns its steps, and the first's error."""
        with Stepwise(kind, Shard(self.rank, length), batch_size=2, seed=3, **options) as run:
            first = run.begin()
            run.step()
            steps = len(run.epoch())
            try:
                for _ in range(length):  # batches that were ready before may still be delivered
                    run.step(first)
            except Exception as error:
                return steps, f"{type(error).__name__}: {error}"
            return steps, "nothing"

    def stream_resumed(self, lengths: list[int], steps: int, shard: str, **options: Any) -> tuple[list[Any], list[Any]]:
        """Return an epoch read without interruption, and an epoch that another loader continues after some steps."""
        dataset = self._shard(lengths, shard, None)
        options = {"batch_size": 2, "seed": 3, "recovery": Recovery(allow_replay=True), **options}
        with Stepwise("sync", dataset, **options) as run:
            whole = [batch.tolist() for batch in run.epoch()]
        with Stepwise("sync", dataset, **options) as run:
            run.begin()
            parts = [batch.tolist() for batch in run.take(steps)]
            self.kept = run.loader.state_dict()
        with Stepwise("sync", dataset, **options) as run:
            run.loader.load_state_dict(self.kept)
            return whole, parts + [batch.tolist() for batch in run.epoch()]

    def state(self) -> dict[str, Any]:
        """Return the state that `stream_resumed` took."""
        return self.kept

    def grouped(self, url: str, members: list[list[int]], **options: Any) -> list[Ended]:
        """Call `shards` where each of these groups of ranks has all shards for itself."""
        groups: list[Any] = [torch.distributed.new_group(ranks) for ranks in members]
        own = next(group for group, ranks in zip(groups, members, strict=True) if self.rank in ranks)
        try:
            return self.shards(url, group=own, **options)
        finally:
            torch.distributed.destroy_process_group(own)

    def refusal(self, state: dict[str, Any]) -> str:
        """Load a state into a loader over this rank's shard. Returns the error, or "accepted"."""
        with Stepwise("sync", Shard(self.rank, 9), batch_size=2, seed=3, recovery=Recovery(allow_replay=True)) as run:
            try:
                run.loader.load_state_dict(state)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "accepted"

    def anew(self, store: str) -> list[int]:
        """Return a loader's steps in epochs before and after torch.distributed was shut down and initialized again."""
        with Stepwise("sync", Shard(self.rank, 6 + 4 * self.rank), batch_size=2, seed=3, num_workers=2) as run:
            before = len(run.epoch())
            torch.distributed.destroy_process_group()
            join(store, self.rank, self.world)
            return [before, len(run.epoch())]

    # ---------------------------------------------------------------------------------------- map datasets

    def mapped(
        self,
        length: int,
        *,
        kind: str = "sync",
        epochs: int = 1,
        dealt: bool = False,
        state: dict[str, Any] | None = None,
        steps: int | None = None,
        **options: Any,
    ) -> tuple[list[list[Any]], int, dict[str, Any]]:
        """Read epochs of a loader over a map dataset. Returns them, its ``len`` and its state afterwards.

        Args:
            length: samples.
            kind: of loader.
            epochs: how many.
            dealt: with torch's `DistributedSampler`.
            state: to begin from.
            steps: end each epoch after this number of steps.
            options: the loader's.
        """
        if dealt:
            options["sampler"] = DistributedSampler(Rows(length), seed=4)
        found = []
        with Stepwise(kind, AllDraws(length), **options) as run:
            if state is not None:
                run.loader.load_state_dict(state)
            for epoch in range(epochs):
                if dealt and options.get("seed") is None:
                    options["sampler"].set_epoch(epoch)
                run.begin()
                batches = run.rest() if steps is None else run.take(steps)
                found.append([batch.tolist() for batch in batches])
            return found, len(run.loader), run.loader.state_dict()

    def table(self, kind: str, folder: str, **options: Any) -> list[list[str]]:
        """See `package_tables.read_table`."""
        return read_table(kind, folder, **options)

    def dealt_by_torch(self, length: int, epochs: int, batch_size: int) -> list[list[Any]]:
        """Return the indices of epochs of torch's own loader with its `DistributedSampler`."""
        sampler: Any = DistributedSampler(Rows(length), seed=4)
        loader = torch.utils.data.DataLoader(Rows(length), batch_size, sampler=sampler)
        found = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            found.append([batch.tolist() for batch in loader])
        return found

    # ------------------------------------------------------------------------------------------- the group

    def left(self) -> dict[str, Any]:
        """Return the loaders' resources that still exist, once everything that ends by itself has had time to."""
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("asyncloader"):
                thread.join(PATIENCE_S)
        gc.collect()
        destroy_unused()
        return {
            "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncloader")],
            "children": own_children(),
            "sockets": sum(name.startswith("socket:") for name in _descriptors()),
        }


def _descriptors() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            names.append(str(link.readlink()))
    return names


def join(store: str, rank: int, world: int) -> None:
    """Join the group, and open all connections."""
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.distributed.barrier()


def main(arguments: list[str]) -> None:
    """Serve calls (name, values, named), each with a result (whether it succeeded, value or traceback).

    Args:
        arguments: descriptor of the connection, store, rank, world size.
    """
    fd, store, rank, world = arguments
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    place = Place(int(rank), int(world))
    join(store, place.rank, place.world)
    gc.collect()
    gc.freeze()  # the imports' objects are large, and belong to no loader
    with Connection(int(fd)) as parent:
        parent.send((True, "ready"))
        while True:
            try:
                name, values, named = parent.recv()
            except EOFError:
                break
            try:
                parent.send((True, getattr(place, name)(*values, **named)))
            except BaseException:
                parent.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # for tests that set no method: three fork servers would take long to import torch
    multiprocessing.set_start_method("fork")
    from tests.helpers import ranks_script  # so that workers of any start method find the classes

    ranks_script.main(sys.argv[1:])
