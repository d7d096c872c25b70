"""The process group on which the ranks of one loader agree: gloo, never the trainer's.

Data path: beside the agreement. Made when a loader's first iterator is, destroyed with the last who refers to it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from asyncloader.rank_view import Topology

__all__ = ["RankGroup", "make_group"]

_TIMEOUT = timedelta(days=1)
"""Of a reduction. A rank that is ahead waits in one while the others validate or save, which is no failure; one that
ends is noticed at once."""


class RankGroup:
    """A gloo group of all ranks, for one loader; destroyed with the last who refers to it.

    Args:
        group: of torch.distributed.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._world = weakref.ref(torch.distributed.group.WORLD)
        self._owner = os.getpid()
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
        both = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
        if self._broken is None:
            try:
                torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN, group=self._group)
                return int(both[0]), -int(both[1])
            except Exception as error:
                self._broken = str(error)
        raise RuntimeError(self._broken)  # not the error itself: its traceback holds the group

    def close(self) -> None:
        """Destroy the group. Local; the other ranks' reductions fail, unless all that they wait for has been sent."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # torch.distributed was shut down already
                torch.distributed.destroy_process_group(group)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # Its sockets and threads would stay otherwise: torch keeps each group until it is told. A forked child has none
        # of the threads that this would wait for.
        if not exiting() and os.getpid() == self._owner:
            self.close()


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
    return RankGroup(distributed.new_group(backend="gloo", timeout=_TIMEOUT))
