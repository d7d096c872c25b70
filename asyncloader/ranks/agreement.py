"""Ends the epoch at the same step on all ranks, where their streams differ in length.

Data path: reorder -> stage -> [agreement] -> consumer. For iterable datasets on several ranks, in seeded mode or with
shards that the ranks share; the ranks of a map dataset know their equal counts.

A rank that runs out of batches while the others continue would leave them waiting for ever in their next collective. So
the ranks agree on each step before it is delivered: one small all-reduce, on a gloo group of the loader's own (never
the trainer's), in a separate thread, as far ahead as batches are ready. If every rank knows its number of batches, a
single reduction at the beginning of the epoch is enough. There they also compare what they read (`Agreement.reads`).
Where they share shards, rank 0 gives its list to the others before their first epoch (`Agreement.share_list`).

All ranks take part in the same reductions in the same order, so each sees the same results. A rank that leaves an epoch
early makes a last reduction that says so. The epochs of a loader are strictly ordered: an epoch's first reduction is
made only when the epoch before is over on this rank, or has been given up for it.

`Agreement` holds one epoch's protocol; `AgreementStage` runs it in the pipeline, ahead of the delivery.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from asyncloader.base.events import Action, AllDropped, Deliver, Fail, Finish, WorkerFailure
from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.peer_text import block_of, line_of
from asyncloader.base.process_hooks import at_exit
from asyncloader.errors import LoaderClosed, LoaderError, RanksDisagree, is_tried_again
from asyncloader.ranks.process_group import RankGroup

_T = TypeVar("_T")

_BATCH, _ENDED, _FAILED, _LEFT = 3, 2, 1, 0
_UNKNOWN = -1
_LISTS = -2  # below it, less a rank's number: that rank cannot list
_MOST_TEXT = 2000  # characters of another rank's error
_TEXT_BYTES = 512
_NO_RANK = 1 << 31

_EXIT_SECONDS = 2.0
"""How long an exiting process waits for the other ranks to be notified."""

_REPLACED = (
    "a newer iterator of this loader has replaced this one: on several ranks a stream has one iterator at a time"
)


_OTHER_KIND = (
    "another rank reads a dataset of another kind: give all ranks the same dataset, with the same streams= and seed="
)

_PAUSED = (
    "this rank failed, or was interrupted, at step {}. The epoch ended there on all ranks, as none of them waits for "
    "another: load the state that the loader has now, on each rank, and begin it again"
)


def length_is_exact(dataset: Any, num_workers: int, *, assigns_shards: bool) -> bool:
    """Whether the length of a stream gives this rank's exact number of batches, so that a single reduction is enough.

    It does not if several workers may each end with a short batch or drop it, or if the ranks share shards that differ
    in size.
    """
    return num_workers <= 1 and hasattr(dataset, "__len__") and not assigns_shards


class Agreement:
    """One rank's side of one epoch's agreement. All methods block, except `give_up`. Any thread.

    Args:
        group: from `make_group`.
        count: number of batches of this rank; None if unknown.
        uneven_is_error: whether to raise if the ranks' epochs differ in length, instead of ending with the shortest.
        advice: why `reads` must be equal, for the error.
        lists: whether the ranks call `share_list` before their first epoch's first step.
    """

    def __init__(
        self, group: RankGroup, count: int | None, *, uneven_is_error: bool, advice: str, lists: bool = False
    ) -> None:
        self.reads: str | None = None
        """What this rank reads, in words that must be equal on all ranks. To be set before its first step; None: not
        known.
        """
        self._advice = advice
        self._lists = lists
        self._group = group
        self._count = count
        self._error = uneven_is_error
        self._step = 0
        self._limit: int | None = None
        self._begun = False
        self._over = False
        self._closed: str | None = None  # the reason, if this rank gave the epoch up
        self._owner = os.getpid()
        join_at_exit()
        _live.add(self)
        # Held while reducing: another thread may give the epoch up while one waits for its steps.
        self._lock = threading.Lock()
        self._before = group.begin(self)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        with self._lock:
            try:
                yield
            finally:
                if self._over or self._limit is not None:
                    self._group.end(self)

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank whose list `share_list` gives to all."""
        return self._group.rank == 0

    @property
    def listed(self) -> bool:
        """Whether the ranks share a list since an earlier epoch."""
        return self._group.listed

    def share_list(self, data: bytes = b"", failure: str | None = None) -> bytes:
        """Return rank 0's list, before the first step. Of an epoch after one in which the ranks shared it: nothing.

        Args:
            data: rank 0's list; empty on other ranks, and if each rank lists for itself.
            failure: why this rank cannot list.

        Raises:
            RanksDisagree: a rank has a failure, which the text has, or left before; its epoch is over on all ranks.
            LoaderClosed: this rank has given the epoch up.
        """
        with self._locked():
            self._check_open()
            self._make_earlier_way()
            return self._share_list(data, failure)

    def batch(self) -> bool:
        """Report a batch for the next step. Returns whether to deliver it; False: the epoch is over.

        Raises:
            RanksDisagree: another rank failed or left; or it has no batch, and that is an error.
            LoaderClosed: this rank has given the epoch up.
        """
        with self._locked():
            self._check_open()
            self._begin()
            if self._limit is not None:
                self._over = self._over or self._step >= self._limit
            elif not self._over:
                self._judge(_BATCH)
            self._step += not self._over
            return not self._over

    def end(self) -> None:
        """Report that this rank has no more batches.

        Raises:
            RanksDisagree: another rank has more, and that is an error; or it failed or left; or this rank had announced
                more.
            LoaderClosed: this rank has given the epoch up.
        """
        with self._locked():
            self._check_open()
            self._begin()
            if self._over:
                return
            if self._limit is None:
                self._judge(_ENDED)
            self._over = True
            if self._limit is not None and self._step < self._limit:
                raise RanksDisagree(
                    f"the dataset's length promised {self._limit} batches or more, but its stream ended after "
                    f"{self._step}; make __len__ right, or leave it out"
                )

    def fail(self) -> bool:
        """Report an error instead of the next batch, so that the other ranks do not wait for it.

        If all ranks know their number of batches, none waits, and the epoch continues; otherwise it ends.

        Returns:
            Whether the epoch continues.
        """
        with self._locked():
            self._last(_FAILED)
            self._step += not self._over
            return not self._over

    def pause(self) -> None:
        """Report that the next batch is interrupted, and may come at a later call: no other rank waits for that.

        If all ranks know their number of batches, none waits, and the batch may come. Otherwise this ends the epoch:
        the next call raises.
        """
        with self._locked():
            self._last(_FAILED)
            if self._over and self._limit is None:
                self._closed = self._closed or _PAUSED.format(self._step)

    def leave(self) -> None:
        """Give the epoch up."""
        self._close("this iterator was closed")

    def give_up(self) -> None:
        """`leave` without waiting, in a thread that ends once the other ranks were notified. Any thread."""
        if os.getpid() != self._owner or self._over or self._limit is not None or sys.is_finalizing():
            return
        self._closed = self._closed or "this iterator was closed"
        with contextlib.suppress(RuntimeError):  # at exit no thread can start; the other ranks will notice
            start_thread(self.leave)

    # -------------------------------------------------------------------- these take the lock, or are called with it

    def _close(self, why: str) -> None:
        self._closed = self._closed or why  # set before the lock is taken: its holder may run for many steps
        with self._locked():
            self._last(_LEFT)
            self._over = True

    def _make_way(self) -> None:
        """End this epoch's reductions, because a newer epoch begins."""
        with self._locked():
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
        """Notify the other ranks, if they would wait for this rank."""
        with contextlib.suppress(RanksDisagree):  # the epoch is over in either case
            self._begin()
            if not self._over and self._limit is None:
                self._over = True
                self._reduce(flag)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._make_earlier_way()
        if self._lists:  # not yet, if this rank leaves before it has a plan: the others must not wait for it
            self._share_list(b"", self._closed or "it failed, or was interrupted, before")
        least, most = self._reduce(_UNKNOWN if self._count is None else self._count)
        if least < _UNKNOWN:
            self._over = True
            raise RanksDisagree(_OTHER_KIND)
        self._compare()
        if least == _UNKNOWN:
            return
        self._limit = least
        if least == most:
            return
        poor, rich = (self._first_rank(self._count == count) for count in (least, most))
        self._refuse_uneven(poor, least, rich, str(most))

    def _make_earlier_way(self) -> None:
        """End the reductions of earlier epochs. All ranks make the same reductions in the same order: the last ones of
        earlier epochs come before this epoch's first.
        """
        earlier: list[Agreement] = []
        before, self._before = self._before, None
        while before is not None:
            earlier.append(before)
            before = before._before
        for agreement in reversed(earlier):
            agreement._make_way()

    def _share_list(self, data: bytes, failure: str | None) -> bytes:
        # Asked in the order of the reductions, in which all ranks have the same answer.
        if self._group.listed:
            return b""
        least, most = self._reduce(_LISTS if failure is None else _LISTS - 1 - self._group.rank)
        if least == most == _LISTS:
            found = self._together(partial(self._group.share, data, 0))
            self._group.listed = True
            return found
        self._begun = self._over = True
        if most > _LISTS:
            raise RanksDisagree(_OTHER_KIND)
        rank = _LISTS - 1 - least
        text = (failure or "")[:_MOST_TEXT].encode(errors="replace")
        why = block_of(self._together(partial(self._group.share, text, rank)).decode(errors="replace"), _MOST_TEXT)
        raise RanksDisagree(f"rank {rank} could not list the shards for all ranks: {why}")

    def _judge(self, flag: int) -> None:
        """Send this rank's flag for the next step to the other ranks, and judge by all flags."""
        least, most = self._reduce(flag)
        if least == _BATCH:
            return
        self._over = True
        if least == _FAILED:
            raise RanksDisagree(f"another rank's loader failed at step {self._step}; its own error says why")
        if least == _LEFT:
            raise RanksDisagree(f"another rank left the epoch before step {self._step}, and this one did not")
        if most == _BATCH:
            ended, goes_on = (self._first_rank(flag == each) for each in (_ENDED, _BATCH))
            self._refuse_uneven(ended, self._step, goes_on, "more")

    def _refuse_uneven(self, poor: int, least: int, rich: int, most: str) -> None:
        if self._error:
            self._over = True
            raise RanksDisagree(
                f"rank {poor} has {least} batches in this epoch and rank {rich} has {most} (on_uneven='error'); give "
                "them equal shares, or use on_uneven='drop'"
            )

    def _compare(self) -> None:
        """Compare what all ranks read. All must call it, also those that do not know it.

        Raises:
            RanksDisagree: it differs.
        """
        mine = _UNKNOWN
        if self.reads is not None:
            mine = int.from_bytes(
                hashlib.blake2b(self.reads.encode(errors="replace"), digest_size=7).digest(), "little"
            )
        least, most = self._reduce(mine)
        if least in (most, _UNKNOWN):
            return
        self._over = True
        ranks = sorted(self._first_rank(mine == each) for each in (least, most))
        first, second = map(self._text_of, ranks)
        raise RanksDisagree(f"rank {ranks[1]} reads {second}, but rank {ranks[0]} reads {first}: {self._advice}")

    def _text_of(self, rank: int) -> str:
        """Return what a rank reads, in words. All ranks must call it."""
        text = (self.reads or "").encode(errors="replace")[:_TEXT_BYTES]
        return line_of(self._together(partial(self._group.share, text, rank)).decode(errors="replace"))

    def _first_rank(self, mine: bool) -> int:
        """The first rank that calls this with True. All ranks must call it, whatever their `on_uneven`: those that do
        not would meet the next epoch's reductions.
        """
        return self._reduce(self._group.rank if mine else _NO_RANK)[0]

    def _reduce(self, number: int) -> tuple[int, int]:
        return self._together(partial(self._group.reduce, number))

    def _together(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            self._over = True
            # Ranks that are still connected to this rank must not wait for it.
            self._group.close()
            raise RanksDisagree(
                f"the ranks could not agree on step {self._step}: another rank has ended, torch.distributed was shut "
                f"down, or the network failed ({error})"
            ) from None


# Agreements and stages that may still reduce, and the threads that do.
_live: LiveObjects[Agreement] = LiveObjects()
_stages: LiveObjects[Any] = LiveObjects()
_threads: LiveObjects[threading.Thread] = LiveObjects()


def close_at_exit(stage: Any) -> None:
    """Call the stage's `close_soon` when the process exits, if it is still alive."""
    _stages.add(stage)


def start_thread(function: Callable[[], None]) -> None:
    """Run a function that may wait for other ranks, in a thread of its own."""
    # A daemon: a reduction that the other ranks never join must not keep the process.
    thread = threading.Thread(target=function, name="asyncloader-ranks", daemon=True)
    _threads.add(thread)
    thread.start()


def join_at_exit() -> None:
    """Let an exiting process wait for the threads of `start_thread`, two seconds at most."""
    at_exit(_leave_all)


def _leave_all() -> None:
    """At exit, notify the other ranks and give them a moment to answer. A reduction that returned while the interpreter
    is finalizing would abort the process, because its thread is unwound through C++.
    """
    for stage in _stages:
        stage.close_soon()
    for agreement in _live:
        agreement.give_up()
    deadline = monotonic() + _EXIT_SECONDS
    for thread in _threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - monotonic()))


class AgreementStage:
    """The pipeline stage that passes items on once the ranks have agreed on them.

    Args:
        agreement: this epoch's agreement.
        forward: called in the stage's thread with each item, in order.
        discard: called with an item that will not be delivered.
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
        """Add an item. Returns at once. Any thread."""
        self._items.put(item)

    def _run(self) -> None:
        ended = False
        while (item := self._items.get()) is not None:
            if ended or self._closed:
                self._discard(item)
                continue
            for agreed in self._agreed(item):
                self._give(agreed)
                ended = isinstance(agreed, (Finish, Fail))
        self._agreement.leave()

    def _give(self, item: Action) -> None:
        with self._lock:
            if not self._closed:
                self._forward(item)
                return
        self._discard(item)

    def _agreed(self, item: Action) -> list[Action]:
        """The items to forward for this item."""
        try:
            if isinstance(item, Fail) and is_tried_again(item.error):
                self._agreement.pause()
                return [item]
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
        """End the stage. Does not wait: the thread ends once the other ranks were notified."""
        with self._lock:
            self.close_soon()

    def close_soon(self) -> None:
        """`close` without its lock, for finalizers and at exit: an item may still be forwarded."""
        self._closed = True
        self._items.put(None)
