"""Ranks with streams of uneven length end their epochs at the same step.

Data path: reorder -> pin_memory -> [agreement] -> consumer. Seeded mode, iterable datasets, several ranks; map datasets
need none of it, their counts follow from the length.

A rank that runs out of batches while the others go on would leave them waiting in their next collective for ever. So
the ranks agree on each step before it is delivered: one small reduction of a number, on a gloo group of the loader's
own (never the trainer's), in a thread of its own, as far ahead as batches are ready. Where every rank knows its number
of batches, one reduction at the beginning does for the epoch.

All ranks take part in the same reductions: each of them sees the same result, and an epoch that one rank leaves early
ends with a last one that says so.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from asyncloader.errors import RanksDisagree
from asyncloader.events import Action, Deliver, Fail, Finish
from asyncloader.rank_view import Topology

__all__ = ["Agreement", "AgreementStage", "make_group"]

_BATCH, _ENDED, _FAILED, _LEFT = 3, 2, 1, 0
_UNKNOWN = -1


def make_group(topology: Topology) -> Any:
    """A gloo group of all ranks. Collective: every rank must make its loaders' first iterators in the same order.

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
    return distributed.new_group(backend="gloo")


class Agreement:
    """One epoch's agreement, as one rank sees it. Blocking; one thread at a time.

    Args:
        group: of `make_group`.
        count: batches that this rank will have; None when nobody knows.
        uneven_is_error: raise where the ranks' epochs have different lengths, instead of ending with the shortest.
    """

    def __init__(self, group: Any, count: int | None, *, uneven_is_error: bool) -> None:
        self._group = group
        self._count = count
        self._error = uneven_is_error
        self._step = 0
        self._limit: int | None = None
        self._begun = False
        self.over = False

    def batch(self) -> bool:
        """This rank has a batch for the next step: whether it is to be delivered. False: the epoch is over.

        Raises:
            RanksDisagree: another rank failed, left, or has none, and that is an error.
        """
        self._begin()
        if not self.over and self._limit is not None:
            self.over = self._step >= self._limit
        elif not self.over:
            self._judge(*self._reduce(_BATCH))
        self._step += 1
        return not self.over

    def end(self) -> None:
        """This rank has no more batches.

        Raises:
            RanksDisagree: another rank has, and that is an error; or it failed or left; or this one said to have more.
        """
        self._begin()
        if self.over:
            return
        if self._limit is None:
            self._judge(*self._reduce(_ENDED))
        elif self._step < self._limit:
            self.over = True
            raise RanksDisagree(
                f"the dataset's length promised {self._limit} batches or more, but its stream ended after "
                f"{self._step}; make __len__ right, or leave it out"
            )
        self.over = True

    def fail(self) -> None:
        """This rank's epoch ends with an error: the others must not wait for it."""
        self._last(_FAILED)

    def leave(self) -> None:
        """This rank gives the epoch up."""
        self._last(_LEFT)

    def _last(self, flag: int) -> None:
        if self.over:
            return
        self._begin()
        self.over = True
        if self._limit is None:
            self._reduce(flag)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        least, most = self._reduce(_UNKNOWN if self._count is None else self._count)
        if least == _UNKNOWN:
            return
        self._limit = least
        if least != most and self._error:
            self.over = True
            raise RanksDisagree(
                f"the ranks have between {least} and {most} batches in this epoch (on_uneven='error'); give them equal "
                "shares, or use on_uneven='drop'"
            )

    def _judge(self, least: int, most: int) -> None:
        if least == _BATCH:
            return
        self.over = True
        if least == _FAILED:
            raise RanksDisagree(f"another rank's loader failed at step {self._step}; its own error says why")
        if least == _LEFT:
            raise RanksDisagree(f"another rank left the epoch before step {self._step}, and this one did not")
        if most == _BATCH and self._error:
            raise RanksDisagree(
                f"at step {self._step} some ranks have a batch and others have none (on_uneven='error'); give them "
                "equal shares, or use on_uneven='drop'"
            )

    def _reduce(self, number: int) -> tuple[int, int]:
        """The least and the largest of all ranks' numbers."""
        both = torch.tensor([number, -number], dtype=torch.int64)
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN, group=self._group)
        return int(both[0]), -int(both[1])


class AgreementStage:
    """Passes items on once the ranks have agreed on them.

    Args:
        agreement: of this epoch.
        forward: called in the stage's thread with each item, in order.
        discard: called with an item that nobody will take.
    """

    def __init__(
        self, agreement: Agreement, forward: Callable[[Action], None], discard: Callable[[Action], None]
    ) -> None:
        self._agreement = agreement
        self._forward = forward
        self._discard = discard
        self._items: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        # A daemon: a reduction that the other ranks never join must not keep the process.
        self._thread = threading.Thread(target=self._run, name="asyncloader-agree", daemon=True)
        self._thread.start()

    def put(self, item: Action) -> None:
        """Take an item; returns at once. Any thread."""
        self._items.put(item)

    def _run(self) -> None:
        agreement = self._agreement
        try:
            while (item := self._items.get()) is not None:
                if agreement.over:
                    self._discard(item)
                    continue
                self._forward(self._agreed(item))
            agreement.leave()
        except Exception as error:  # a peer is gone: gloo says so
            agreement.over = True
            self._forward(Fail(error))

    def _agreed(self, item: Action) -> Action:
        try:
            if isinstance(item, Deliver):
                if self._agreement.batch():
                    return item
                self._discard(item)
                return Finish()
            if isinstance(item, Finish):
                self._agreement.end()
            elif isinstance(item, Fail):
                self._agreement.fail()
        except RanksDisagree as error:
            self._discard(item)
            return Fail(error)
        return item

    def close(self) -> None:
        """Nothing will come any more. Does not wait: the thread ends once the other ranks know."""
        self._items.put(None)
