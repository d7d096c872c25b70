"""Ranks with streams of uneven length end their epochs at the same step.

Data path: reorder -> pin_memory -> [agreement, by its stage] -> consumer. In seeded mode, for iterable datasets on
several ranks; map datasets need none of it, their counts follow from the length.

A rank that runs out of batches while the others go on would leave them waiting in their next collective for ever. So
the ranks agree on each step before it is delivered: one small reduction of a number, on a gloo group of the loader's
own (never the trainer's), in a thread of its own, as far ahead as batches are ready. Where every rank knows its number
of batches, one reduction at the beginning does for the epoch.

All ranks take part in the same reductions, in the same order: each of them sees the same results, and an epoch that one
rank leaves early ends with a last one that says so. A loader's epochs follow one another: the first reduction of one is
made when the epoch before is over on this rank, given up for it if need be.

The stage of the pipeline in which the ranks agree on each batch, ahead of its delivery.

Data path: reorder -> pin_memory -> [agreement_stage] -> consumer. See `agreement.py` for what is agreed, and why.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any

from asyncloader.errors import LoaderClosed, LoaderError, RanksDisagree
from asyncloader.events import Action, AllDropped, Deliver, Fail, Finish, WorkerFailure
from asyncloader.ranks.process_group import RankGroup

__all__ = [
    "Agreement",
    "AgreementStage",
    "close_at_exit",
    "in_daemon",
    "start_thread",
]

_BATCH, _ENDED, _FAILED, _LEFT = 3, 2, 1, 0
_UNKNOWN = -1

_EXIT_SECONDS = 2.0
"""How long a process that ends waits for the other ranks to hear of it."""

_REPLACED = (
    "a newer iterator of this loader has taken this one's place: on several ranks a stream has one iterator at a time"
)


class Agreement:
    """One epoch's agreement, as one rank sees it. Its methods block, but for `give_up`; any thread.

    Args:
        group: of `make_group`.
        count: batches that this rank will have; None when nobody knows.
        uneven_is_error: raise where the ranks' epochs have different lengths, instead of ending with the shortest.
    """

    def __init__(self, group: RankGroup, count: int | None, *, uneven_is_error: bool) -> None:
        self._group = group
        self._count = count
        self._error = uneven_is_error
        self._step = 0
        self._limit: int | None = None
        self._begun = False
        self._over = False
        self._closed: str | None = None  # why, if this rank gave the epoch up
        self._owner = os.getpid()
        _install_exit_hook(self._owner)
        _live.add(self)
        # Held while reducing: the epoch may be given up in another thread than the one that asks for its steps.
        self._lock = threading.Lock()
        self._before = group.begin(self)

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        with self._lock:
            try:
                yield
            finally:
                if self._over or self._limit is not None:
                    self._group.end(self)

    def batch(self) -> bool:
        """This rank has a batch for the next step: whether it is to be delivered. False: the epoch is over.

        Raises:
            RanksDisagree: another rank failed, left, ended, or has none, and that is an error.
            LoaderClosed: this rank has given the epoch up.
        """
        with self._turn():
            self._check_open()
            self._begin()
            if self._limit is not None:
                self._over = self._over or self._step >= self._limit
            elif not self._over:
                self._judge(*self._reduce(_BATCH))
            self._step += not self._over
            return not self._over

    def end(self) -> None:
        """This rank has no more batches.

        Raises:
            RanksDisagree: another rank has, and that is an error; or it failed or left; or this one said to have more.
            LoaderClosed: this rank has given the epoch up.
        """
        with self._turn():
            self._check_open()
            self._begin()
            if self._over:
                return
            if self._limit is None:
                self._judge(*self._reduce(_ENDED))
            self._over = True
            if self._limit is not None and self._step < self._limit:
                raise RanksDisagree(
                    f"the dataset's length promised {self._limit} batches or more, but its stream ended after "
                    f"{self._step}; make __len__ right, or leave it out"
                )

    def fail(self) -> bool:
        """This rank has an error in the place of its next batch: the others must not wait for it.

        Where all know how many batches there will be, nobody does, and the epoch goes on; otherwise it ends.

        Returns:
            Whether the epoch goes on.
        """
        with self._turn():
            self._last(_FAILED)
            self._step += not self._over
            return not self._over

    def leave(self) -> None:
        """This rank gives the epoch up."""
        self._close("this iterator was closed")

    def give_up(self) -> None:
        """`leave` without waiting: in a thread of its own, which ends once the other ranks know. Any thread."""
        if os.getpid() != self._owner or self._over or self._limit is not None or sys.is_finalizing():
            return
        self._closed = self._closed or "this iterator was closed"
        with contextlib.suppress(RuntimeError):  # no threads any more: the process ends, and the others will notice
            start_thread(self.leave)

    # ------------------------------------------------------------------------------- with the lock held, or taking it

    def _close(self, why: str) -> None:
        self._closed = self._closed or why  # at once: who holds the lock may go on for many steps
        with self._turn():
            self._last(_LEFT)
            self._over = True

    def _make_way(self) -> None:
        """A newer epoch is to begin: this one must make no further reduction."""
        with self._turn():
            with contextlib.suppress(RanksDisagree):
                self._begin()
            if not self._over and self._limit is None:
                self._closed = self._closed or _REPLACED
                self._last(_LEFT)

    def _check_open(self) -> None:
        if self._closed is not None:
            self._last(_LEFT)
            raise LoaderClosed(self._closed)

    def _last(self, flag: int) -> None:
        """Tell the others, if they would wait for this rank."""
        with contextlib.suppress(RanksDisagree):  # the epoch is over all the same
            self._begin()
            if not self._over and self._limit is None:
                self._over = True
                self._reduce(flag)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        earlier: list[Agreement] = []
        before, self._before = self._before, None
        while before is not None:
            earlier.append(before)
            before = before._before
        for agreement in reversed(earlier):
            agreement._make_way()
        least, most = self._reduce(_UNKNOWN if self._count is None else self._count)
        if least == _UNKNOWN:
            return
        self._limit = least
        if least != most and self._error:
            self._over = True
            raise RanksDisagree(
                f"the ranks have between {least} and {most} batches in this epoch (on_uneven='error'); give them equal "
                "shares, or use on_uneven='drop'"
            )

    def _judge(self, least: int, most: int) -> None:
        if least == _BATCH:
            return
        self._over = True
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
        try:
            return self._group.reduce(number)
        except Exception as error:
            self._over = True
            # Those that are connected to this rank but not to the one that is gone must not wait for this one.
            self._group.close()
            raise RanksDisagree(
                f"the ranks could not agree on step {self._step}: another rank has ended, torch.distributed was shut "
                f"down, or the network failed ({error})"
            ) from None


async def in_daemon(function: Callable[[], Any]) -> Any:
    """Call a method that blocks, in a thread that keeps neither loop nor process if the other ranks never join."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def done(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(), None
        except Exception as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(done, *outcome)
        del outcome

    start_thread(run)
    return await future


# What may still reduce, and the threads that do.
_live: weakref.WeakSet[Agreement] = weakref.WeakSet()
_stages: weakref.WeakSet[Any] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_at_exit(stage: Any) -> None:
    """Have the stage's `close_soon` called when the process ends, if it still lives."""
    _stages.add(stage)


def start_thread(function: Callable[[], None]) -> None:
    """Run a function that reduces in a thread of its own."""
    # A daemon: a reduction that the other ranks never join must not keep the process.
    thread = threading.Thread(target=function, name="asyncloader-agree", daemon=True)
    _threads.add(thread)
    thread.start()


@functools.cache
def _install_exit_hook(owner: int) -> None:
    atexit.register(_leave_all, owner)


def _leave_all(owner: int) -> None:
    """At exit: tell the other ranks. A reduction that returned while the interpreter ends would abort the process (its
    thread is unwound through C++), and it would when they end, too: so they get a moment to hear it.
    """
    if os.getpid() != owner:
        return  # a forked child has none of the threads, and locks may be as they were
    for stage in list(_stages):
        stage.close_soon()
    for agreement in list(_live):
        agreement.give_up()
    deadline = monotonic() + _EXIT_SECONDS
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, deadline - monotonic()))


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
        self._closed = False
        self._lock = threading.Lock()  # nothing is forwarded once `close` has returned
        close_at_exit(self)
        start_thread(self._run)

    def put(self, item: Action) -> None:
        """Take an item; returns at once. Any thread."""
        self._items.put(item)

    def _run(self) -> None:
        ended = False
        while (item := self._items.get()) is not None:
            if ended or self._closed:
                self._discard(item)
                continue
            for agreed in self._agreed(item):
                self._give(agreed)
                ended = not isinstance(agreed, Deliver)
        self._agreement.leave()

    def _give(self, item: Action) -> None:
        with self._lock:
            if not self._closed:
                self._forward(item)
                return
        self._discard(item)

    def _agreed(self, item: Action) -> list[Action]:
        """What is to be forwarded for this item."""
        try:
            if isinstance(item, Deliver) and isinstance(item.outcome, AllDropped):
                return [item]  # no batch: nothing to agree on
            if isinstance(item, Deliver) and not isinstance(item.outcome, WorkerFailure):
                if self._agreement.batch():
                    return [item]
                self._discard(item)
                return [Finish()]
            if isinstance(item, Finish):
                self._agreement.end()
            elif not self._agreement.fail() and isinstance(item, Deliver):
                return [item, Finish()]
        except LoaderError as error:
            self._discard(item)
            return [Fail(error)]
        return [item]

    def close(self) -> None:
        """Nothing will come any more. Does not wait: the thread ends once the other ranks know."""
        with self._lock:
            self.close_soon()

    def close_soon(self) -> None:
        """`close` without its lock, for finalizers and at exit: an item may be forwarded yet."""
        self._closed = True
        self._items.put(None)
