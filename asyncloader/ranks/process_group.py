"""Manages the gloo process group on which one loader's ranks agree. It is never the trainer's group.

Data path: beside the agreement. The group is made with a loader's first iterator. torch keeps each group, with its
sockets and threads, until it is destroyed explicitly. A finalizer must not do that, because it waits for the group's
threads. So the group of a loader that was collected is only recorded, and destroyed when the next group is made or
another loader is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter, deque
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from asyncloader.base.topology import Topology
from asyncloader.errors import RanksDisagree

_TIMEOUT = timedelta(days=1)
"""Timeout of a reduction. It is long because a rank that is ahead waits while others validate or save, which is not a
failure. A rank that dies is noticed at once."""
_CONNECTING = timedelta(minutes=30)
"""Time in which all ranks begin to read; more, if `init_process_group` was called with a longer timeout. A rank that
died before is not noticed."""
_PIECE = 1 << 15  # numbers that `share` reduces at a time

MOST_SHARED = 1 << 29
"""Bytes that a rank can give to the others at once."""

_DESTROY_SECONDS = 2.0
"""How long a caller waits for the destruction of a group."""


class RankGroup:
    """A gloo group of the ranks that share a stream, for one loader and its epochs.

    Args:
        group: a process group of torch.distributed, or its gloo backend.

    Attributes:
        rank: this process's, in the group.
        listed: whether rank 0 has given the others its list of shards: see `Agreement.share_list`.
    """

    def __init__(self, group: Any) -> None:
        self._group: Any = group
        self.rank = int(group.rank())
        self.listed = False
        # The tensors of all reductions, kept until the group is destroyed. A gloo thread drops a reduction only after
        # that has returned; with the last reference to the tensor it would need the GIL to free it, and torch 2.6
        # holds the GIL while it waits for gloo's threads to end.
        self._both, self._piece = (torch.empty(size, dtype=torch.int64, device="cpu") for size in (2, _PIECE))
        self._world = weakref.ref(torch.distributed.group.WORLD)
        self._finalizer = weakref.finalize(self, _unused.append, (os.getpid(), group, [self._both, self._piece]))
        self._finalizer.atexit = False
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._newest: Any = None

    @property
    def stale(self) -> bool:
        """Whether torch.distributed was initialized again since."""
        return torch.distributed.group.WORLD is not self._world()

    def begin(self, agreement: Any) -> Any:
        """Register a new epoch's agreement. Returns the agreement before it, if that may still reduce, else None."""
        with self._lock:
            before, self._newest = self._newest, agreement
            return before

    def end(self, agreement: Any) -> None:
        """Unregister an agreement, which will not reduce any more."""
        with self._lock:
            if self._newest is agreement:
                self._newest = None

    def reduce(self, number: int) -> tuple[int, int]:
        """The smallest and the largest of all ranks' numbers. Blocks until every rank has called this.

        Raises:
            RuntimeError: a rank has ended, or the network failed; in this call or in an earlier call.
        """
        both = self._both
        both[0], both[1] = number, -number
        self._reduce(both, torch.distributed.ReduceOp.MIN)
        return int(both[0]), -int(both[1])

    def share(self, data: bytes, rank: int) -> bytes:
        """The data of one rank; those of the others are not used. Blocks, and raises, as `reduce`.

        Raises:
            RanksDisagree: they are too large; on all ranks, before any allocates them.
        """
        mine = data if self.rank == rank else b""
        size = self.reduce(len(mine))[1]
        if size > MOST_SHARED:
            raise RanksDisagree(
                f"rank {rank} has {size:,} bytes for the others, and {MOST_SHARED:,} are allowed at most"
            )
        words = np.zeros(-(-size // 8), np.int64)
        words.view(np.uint8)[: len(mine)] = np.frombuffer(mine, np.uint8)
        for first in range(0, len(words), _PIECE):
            given = torch.from_numpy(words[first : first + _PIECE])
            self._piece[: len(given)] = given
            self._reduce(self._piece, torch.distributed.ReduceOp.SUM)  # of one rank's numbers, and zeros
            given.copy_(self._piece[: len(given)])
        return words.tobytes()[:size]

    def _reduce(self, numbers: torch.Tensor, operation: Any) -> None:
        if self._broken is None:
            try:
                options: Any = torch.distributed.AllreduceOptions()
                options.reduceOp = operation
                self._group.allreduce([numbers], options).wait()
            except Exception as error:
                self._broken = str(error)
        if self._broken is not None:
            raise RuntimeError(self._broken)  # not the error itself: its traceback holds the group

    def retire(self) -> None:
        """`close`, unless an agreement may still notify the other ranks: the group then ends with its last user."""
        if self._newest is None:
            self.close()

    def close(self) -> None:
        """Destroy the group on this rank. The other ranks' reductions fail, unless they have all data that they need.

        Takes two seconds at most; after that the destruction continues in a daemon thread. Idempotent.
        """
        self._group = None
        self._finalizer()
        destroy_unused()


# How many groups each set of ranks has made; the members count alike, because they make theirs in the same order.
_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

# Groups that are no longer used: the process that made it, the group, its tensors.
_unused: deque[tuple[int, Any, Any]] = deque()


def destroy(group: Any, numbers: Any) -> None:
    """Destroy a gloo group that this process has made, and wait for that, some seconds at most.

    Args:
        group: the caller keeps no reference to it.
        numbers: the tensor of all its reductions, or a list of them, which have to outlive it.
    """
    _unused.append((os.getpid(), group, numbers))
    del group
    destroy_unused()


def destroy_unused() -> None:
    """Destroy the groups of loaders that were collected or closed. Not for finalizers: it waits some seconds for each.

    Each is destroyed in a thread, where torch waits for the group's own threads until their reductions end.
    """
    while _unused:
        with contextlib.suppress(IndexError):  # another thread took it
            unused = [_unused.popleft()]
            if unused[0][0] != os.getpid():
                continue  # a forked child does not have the threads that this would wait for
            thread = threading.Thread(target=_destroy, args=(unused,), name="asyncloader-destroy", daemon=True)
            thread.start()
            thread.join(_DESTROY_SECONDS)


def _destroy(unused: list[tuple[int, Any, Any]]) -> None:
    _, group, numbers = unused.pop()  # this thread now has the last reference
    with contextlib.suppress(Exception):  # torch.distributed was shut down already, or does not know the group
        torch.distributed.destroy_process_group(group)
    del group  # before the tensors: see `RankGroup`
    del numbers


def has_group(topology: Topology, members: Any) -> bool:
    """Whether torch.distributed connects the ranks of a loader, so that `make_group` can. Arguments as there."""
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    return initialized and distributed.get_world_size(members) == topology.world_size


def make_group(topology: Topology, members: Any, old: RankGroup | None = None) -> RankGroup:
    """A gloo group of the ranks that share a stream; `old` if that is still valid.

    Collective: each of these ranks must make its loaders' first iterators in the same order.

    Args:
        topology: this process's rank, and the number of ranks.
        members: a process group of these ranks; None: all ranks.
        old: the loader's group so far.

    Raises:
        RuntimeError: torch.distributed is not initialized, or has another number of ranks.
        RanksDisagree: another rank cannot be connected, or has not called this in half an hour (or
            in the timeout of `init_process_group`, if that is longer).
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            f"a stream on world_size={topology.world_size} ranks needs torch.distributed: the ranks must agree on when "
            "an epoch ends. Call torch.distributed.init_process_group first, or use a map dataset, or torch mode"
        )
    if distributed.get_world_size(members) != topology.world_size:
        raise RuntimeError(
            f"world_size={topology.world_size}, but torch.distributed has {distributed.get_world_size()} ranks: those "
            "that share out a stream must be the ones that can agree on its end"
        )
    if old is not None and not old.stale:
        return old
    destroy_unused()
    try:
        store = _meet(members)
        if members is None:
            return RankGroup(distributed.new_group(backend="gloo", timeout=_TIMEOUT))
        # Not by `new_group`: all ranks have to call it; or, if the members alone do, each of them must have made the
        # same number of groups, after which it names the new group.
        rank, size = distributed.get_rank(members), distributed.get_world_size(members)
        return RankGroup(distributed.ProcessGroupGloo(store, rank, size, _TIMEOUT))
    except RuntimeError as error:
        raise RanksDisagree(
            "the ranks could not be connected: another rank failed or left while the loader's group was made, or "
            f"cannot be reached ({error})"
        ) from error


def _meet(members: Any) -> Any:
    """Wait until all members are about to connect, and return a store for their group alone.

    To connect takes as long as a reduction may, because torch has one timeout for both.

    Raises:
        RuntimeError: one of them has not come in time.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    distributed: Any = torch.distributed
    ranks = "_".join(map(str, [] if members is None else distributed.get_process_group_ranks(members)))
    made = _made.setdefault(distributed.group.WORLD, Counter())
    made[ranks] += 1
    store = distributed.PrefixStore(f"asyncloader/{ranks}/{made[ranks]}", _get_default_store())
    # More than all, if torch.distributed was initialized again with this store.
    if store.add("come", 1) >= distributed.get_world_size(members):
        store.set("all", "")
    store.wait(["all"], max(_CONNECTING, store.timeout))
    return store
