"""The process group on which the ranks of one loader agree: gloo, never the trainer's.

Data path: beside the agreement. Made when a loader's first iterator is. torch keeps each group, with its sockets and
threads, until it is told; a finalizer must not tell it, because that waits for the group's threads. So the group of a
loader that is gone is only noted, and destroyed when the next one is made, or another loader is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from asyncloader.samplers.distributed import Topology

__all__ = ["RankGroup", "destroy_unused", "make_group"]

_TIMEOUT = timedelta(days=1)
"""Of a reduction. A rank that is ahead waits in one while the others validate or save, which is no failure; one that
ends is noticed at once."""
_DESTROY_SECONDS = 2.0
"""How long the destruction of a group may hold up who asked for it."""


class RankGroup:
    """A gloo group of all ranks, for one loader and its epochs.

    Args:
        group: of torch.distributed.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        # One tensor for all reductions, kept until the group is destroyed. A thread of gloo's lets go of a reduction
        # after that was answered; if it had the last reference to the tensor it would need the GIL to free it, and
        # torch 2.6 holds that while it waits for gloo's threads to end.
        self._numbers = torch.empty(2, dtype=torch.int64, device="cpu")
        self._world = weakref.ref(torch.distributed.group.WORLD)
        self._finalizer = weakref.finalize(self, _unused.append, (os.getpid(), group, self._numbers))
        self._finalizer.atexit = False
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._newest: Any = None

    @property
    def stale(self) -> bool:
        """Whether torch.distributed was initialized anew since."""
        return torch.distributed.group.WORLD is not self._world()

    def begin(self, agreement: Any) -> Any:
        """This epoch's agreement reduces from now on. Returns the one before it, if that may still do so, else None."""
        with self._lock:
            before, self._newest = self._newest, agreement
            return before

    def end(self, agreement: Any) -> None:
        """It will reduce no more."""
        with self._lock:
            if self._newest is agreement:
                self._newest = None

    def reduce(self, number: int) -> tuple[int, int]:
        """The least and the largest of all ranks' numbers. Blocks until every rank has called it.

        Raises:
            RuntimeError: a rank is gone, or the network failed; now, or at an earlier call.
        """
        both = self._numbers
        if self._broken is None:
            both[0], both[1] = number, -number
            try:
                torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN, group=self._group)
                return int(both[0]), -int(both[1])
            except Exception as error:
                self._broken = str(error)
        raise RuntimeError(self._broken)  # not the error itself: its traceback holds the group

    def retire(self) -> None:
        """`close` it unless the other ranks may still have to hear of this one: then it goes with the last user."""
        if self._newest is None:
            self.close()

    def close(self) -> None:
        """Destroy the group. Local; the other ranks' reductions fail, unless all that they wait for has been sent.

        Takes two seconds at most: what is not done by then goes on in a thread that nobody waits for. Idempotent.
        """
        self._group = None
        self._finalizer()
        destroy_unused()


# Groups that nobody uses any more: the process that made each, the group, its tensor.
_unused: deque[tuple[int, Any, torch.Tensor]] = deque()


def destroy_unused() -> None:
    """Destroy the groups of loaders that are gone. Not for finalizers: it waits for each, some seconds at most.

    In a thread: torch waits there for the group's own, for as long as one of them is at a reduction.
    """
    while _unused:
        with contextlib.suppress(IndexError):  # another thread was faster
            unused = [_unused.popleft()]
            if unused[0][0] != os.getpid():
                continue  # a forked child has none of the threads that this would wait for
            thread = threading.Thread(target=_destroy, args=(unused,), name="asyncloader-destroy", daemon=True)
            thread.start()
            thread.join(_DESTROY_SECONDS)


def _destroy(unused: list[tuple[int, Any, torch.Tensor]]) -> None:
    _, group, numbers = unused.pop()  # the last reference is this thread's
    with contextlib.suppress(Exception):  # torch.distributed was shut down already
        torch.distributed.destroy_process_group(group)
    del group  # first, and the tensor then: see `RankGroup`
    del numbers


def make_group(topology: Topology, old: RankGroup | None = None) -> RankGroup:
    """A gloo group of all ranks; `old` if that is still good.

    Collective: every rank must make its loaders' first iterators in the same order.

    Raises:
        RuntimeError: torch.distributed is not initialized, or has another number of ranks.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            f"a stream on world_size={topology.world_size} ranks needs torch.distributed: the ranks must agree on when "
            "an epoch ends. Call torch.distributed.init_process_group first, or use a map dataset, or torch mode"
        )
    if distributed.get_world_size() != topology.world_size:
        raise RuntimeError(
            f"world_size={topology.world_size}, but torch.distributed has {distributed.get_world_size()} ranks: those "
            "that share out a stream must be the ones that can agree on its end"
        )
    if old is not None and not old.stale:
        return old
    destroy_unused()
    return RankGroup(distributed.new_group(backend="gloo", timeout=_TIMEOUT))
