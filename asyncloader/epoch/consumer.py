"""The consumer's side of one epoch, the same for `for` and ``async for``: sampler, opening of batches, counting.

Data path: sampler -> [consumer] -> scheduler ... reorder -> delivery -> [consumer] -> the user.

Everything here runs in the thread that iterates. The order of things for each batch is torch's: a plain sampler is
advanced after the batch has come, and before an error in its place is raised.
"""

from __future__ import annotations

import asyncio
import pickle
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncloader.delivery.device_stage import DeviceStage, OnDevice
from asyncloader.delivery.opener import LARGE, Opener, raise_worker_error
from asyncloader.delivery.stage import Pinned, PinStage, torch_pin
from asyncloader.delivery.transfer import Mover
from asyncloader.epoch.pipeline import Begun, Pipeline
from asyncloader.epoch.plan import Draws, EpochPlan
from asyncloader.epoch.quarantine import Quarantine
from asyncloader.epoch.respawn import Replacer
from asyncloader.events import ENDED, NOTHING, Action, Deliver, LeftOut, Notice, Poisoned, WorkerFailure
from asyncloader.ranks.agreement import AgreementStage
from asyncloader.samplers.distributed import without_batch
from asyncloader.state.progress import Progress
from asyncloader.statistics import Statistics
from asyncloader.workers.listener import Answer
from asyncloader.workers.pool import WorkerPool

__all__ = ["NO_BATCH", "Consumer", "discard"]

NO_BATCH: Final[Any] = object()
"""In place of a batch all of whose samples were left out: take the next one."""


# How far a delivery has come, in this order.
_BEGUN, _OPENING, _OPENED, _LET_GO, _PULLED, _TOLD, _COUNTED, _DONE = range(8)


class Delivery:
    """What was done for the item that is under way: Ctrl-C may end the call of `deliver`, and the next one goes on."""

    __slots__ = ("batch", "descriptors", "error", "item", "offer", "reached")

    def __init__(self) -> None:
        self.item: Deliver | None = None
        """Who calls `deliver` sets it, `batch` and `error` to None when the batch, or the error, is the user's."""
        self.batch: Any = None
        self.error: Any = None  # in its place: an exception, or torch's wrapper of one
        self.descriptors: list[int] | None = None  # the answer's, while they are to be closed
        self.offer: Any = NOTHING  # what the sampler gave
        self.reached = _BEGUN

    def begin(self, item: Deliver) -> None:
        """Nothing was done for this item."""
        # Nothing is called in here, so that Ctrl-C does not come in between.
        self.batch, self.error, self.descriptors, self.offer, self.reached = NO_BATCH, None, None, NOTHING, _BEGUN
        self.item = item


class Consumer:
    """What an iterator does with each batch, and what it hands to the pipeline.

    Args:
        plan: the options that shape the epoch.
        draws: torch's iterator base, which has drawn this iterator's random numbers.
        statistics: the loader's counters.
        progress: the iterator's position.
        quarantine: deals with tasks that kill their workers.
        mover: to the device where batches are delivered; None: that is the CPU.
        ahead: batches that may be there before they are asked for.
    """

    def __init__(
        self,
        plan: EpochPlan,
        draws: Draws,
        statistics: Statistics,
        progress: Progress,
        quarantine: Quarantine,
        mover: Mover | None = None,
        ahead: int = 1,
    ) -> None:
        self._statistics = statistics
        self._plan = plan
        self._quarantine = quarantine
        self._notices: deque[Notice | Begun | Mapping[str, float]] = deque()
        self._progress = progress
        self._tasks = 0  # indices of a plain sampler that were given out
        self._taken = 0  # deliveries
        self._begun = statistics.begin()
        # Nothing here keeps `draws`, which in the sync loader is the iterator itself: it must die when dropped.
        self._workers = plan.workers
        self._source = plan.source
        self._scheduler = plan.scheduler(progress.turn)
        self._draws = weakref.ref(draws)
        # False when there is nothing to advance here: no sampler, or one that a task of the loop reads.
        self._reads = draws.order is not None
        self._first = True
        self.delivery = Delivery()
        self._opener = Opener(statistics)
        self._pins = draws._pin_memory
        self._pin_device = draws._pin_memory_device
        self._mover = mover
        self._ahead = ahead
        self._stage: PinStage | DeviceStage | None = None
        self._agreement = progress.agreement
        self._agreeing: AgreementStage | None = None
        self.offers = self._prime(plan.offers)
        """What the sampler gave before the first wait; in torch mode as much as torch takes then."""

    @property
    def outstanding(self) -> int:
        """Indices given out and not delivered; 0 where there is no plain sampler."""
        return max(0, self._tasks - self._taken)

    def _prime(self, count: int) -> list[Any]:
        offers: list[Any] = []
        while self._reads and len(offers) < count and (offer := self._pull(self._tasks)) is not NOTHING:
            offers.append(offer)
            self._reads = offer is not ENDED
            self._tasks += self._reads
        return offers

    def _pull(self, left: int) -> Any:
        """The sampler's next index, while `left` are outstanding. The same until `_tasks` is moved on."""
        draws = self._draws()
        assert draws is not None
        try:
            step, offer = draws.pull(self._tasks)
        except StopIteration:
            return NOTHING if left else ENDED  # as in torch it is asked again after the next batch
        self._progress.pulled(self._tasks, step)
        return offer

    def pipeline(
        self,
        pool: WorkerPool,
        put: Callable[[Action], None],
        put_from_thread: Callable[[Action], None],
        replacer: Replacer,
    ) -> Pipeline:
        """The epoch's pipeline, which hands items to `put`; `put_from_thread` is used by the pinning stage's thread."""
        sink = put
        if self._agreement is not None:
            self._agreeing = AgreementStage(self._agreement, put_from_thread, discard)
            sink = put_from_thread = self._agreeing.put
        if self._mover is not None:
            self._stage = DeviceStage(self._opener, self._mover, self._statistics, put_from_thread, self._ahead)
            sink = self._stage.put
        elif self._pins:
            self._stage = PinStage(self._opener, torch_pin(self._pin_device), put_from_thread)
            sink = self._stage.put
        indices = None if self._source is None else self._source.reading(self._progress)
        pipeline = Pipeline(
            pool,
            self._scheduler,
            sink,
            indices,
            self._progress.ends,
            replacer=replacer,
            exact=self._plan.seeded,
            replays=self._plan.replays,
            assigner=None if self._progress.assignment is None else self._progress.assignment.assigner,
            adapts=self._plan.adapts,
        )
        self._notices = pipeline.notices
        return pipeline

    async def end_stage(self) -> None:
        """Let the stage finish the batch in hand and end, without holding up the loop meanwhile. If this is cancelled,
        it ends all the same.
        """
        if self._stage is not None:
            await asyncio.shield(asyncio.to_thread(self._stage.close))

    def close(self) -> None:
        """End the stages, once the batch in hand is finished."""
        if self._stage is not None:
            self._stage.close()
        if self._agreeing is not None:
            self._agreeing.close()
        elif self._agreement is not None:
            self._agreement.give_up()  # made, but never iterated

    def close_soon(self) -> None:
        """`close` for finalizers: waits for nothing, so something may be forwarded yet."""
        if self._stage is not None:
            self._stage.close_soon()
        if self._agreeing is not None:
            self._agreeing.close_soon()
        elif self._agreement is not None:
            self._agreement.give_up()

    # ---------------------------------------------------------------------------------------- for each batch

    def opening_blocks(self, item: Deliver) -> bool:
        """Whether `open` would copy so much that an event loop must not wait for it."""
        outcome = item.outcome
        return isinstance(outcome, Answer) and outcome.result.nbytes >= LARGE and self._opener.will_copy(outcome)

    def open(self, outcome: Any) -> Any:
        """The batch; `NO_BATCH` when there is none yet, or an error in its place, which `deliver` will raise."""
        if isinstance(outcome, Answer):
            return self._opener.open(outcome)
        if isinstance(outcome, OnDevice):
            assert isinstance(self._stage, DeviceStage)
            return self._stage.take(outcome)
        return outcome.batch if isinstance(outcome, Pinned) else NO_BATCH

    def deliver(
        self,
        item: Deliver,
        waited: float,
        tell: Callable[[int, Any], None],
        opened: Callable[[], Any] | None = None,
    ) -> Any:
        """The batch for the user, or `NO_BATCH`.

        After a KeyboardInterrupt, called again with the same item, it goes on where it was: the user gets the batch, or
        the error in its place, once, and the sampler's next index is asked for once. What cannot be taken up again is
        the user's own code: a sampler that is a generator has ended when KeyboardInterrupt came out of it, and with it
        the epoch; an `on_error` function, and `collate_fn` after it, are called anew. Statistics may lack the batch.

        Args:
            item: what the pipeline gave.
            waited: seconds that the user waited for it.
            tell: tells the pipeline that it was taken, and what a plain sampler gave next.
            opened: gives the batch if it was opened already.

        Raises:
            Exception: the worker's, if there is an error in the batch's place; or the sampler's. The batches asked
                for before still come, as in torch.
            TooManyBadSamples: this batch's bad samples are more than are allowed. Nothing should be taken any more.
        """
        delivery = self.delivery
        if delivery.item is not item:
            delivery.begin(item)
        if delivery.reached < _TOLD:
            self._open(delivery, item.outcome, opened)
            if delivery.reached < _PULLED:
                self._advance(delivery)
            tell(item.seq, delivery.offer)
            delivery.reached = _TOLD
        if delivery.error is None and delivery.reached < _DONE:
            self._count(delivery, item, item.outcome, waited)
        error = delivery.error
        if error is None:
            return delivery.batch
        self._progress.failed(item.seq)
        try:
            if isinstance(error, BaseException):
                raise error
            raise_worker_error(error)
        finally:
            del error  # its traceback refers to this frame

    def abandon(self, item: Deliver) -> None:
        """Nobody will take the item, whose delivery Ctrl-C ended: its memory comes back."""
        delivery, outcome = self.delivery, item.outcome
        if delivery.item is not item or delivery.reached < _OPENED:
            if isinstance(outcome, Answer):
                self._opener.forget(outcome)
            discard(item)
        elif delivery.reached == _OPENED and isinstance(outcome, Answer):
            self._let_go(delivery, outcome)
        delivery.item, delivery.batch, delivery.error = None, None, None

    def _let_go(self, delivery: Delivery, answer: Answer) -> None:
        if delivery.descriptors is None:
            delivery.descriptors = [] if answer.fd is None else [answer.fd]
        self._opener.let_go(answer, delivery.descriptors)

    def _open(self, delivery: Delivery, outcome: Any, opened: Callable[[], Any] | None) -> None:
        answer = outcome if opened is None and isinstance(outcome, Answer) else None
        if delivery.reached < _OPENED:
            try:
                if answer is None:
                    delivery.batch = self.open(outcome) if opened is None else opened()
                    delivery.reached = _LET_GO
                else:
                    if delivery.reached == _OPENING:
                        self._opener.forget(answer)
                    delivery.reached = _OPENING
                    batch, held = self._opener.build(answer)
                    delivery.batch, delivery.reached = batch, _OPENED if held is None else _LET_GO
            except Exception as error:
                delivery.error, delivery.reached = error, _OPENED
        if delivery.reached == _OPENED:
            if answer is not None:
                self._let_go(delivery, answer)
            delivery.reached = _LET_GO

    def _advance(self, delivery: Delivery) -> None:
        """Ask the sampler for the next index."""
        error, offer, left = delivery.error, NOTHING, self._tasks - self._taken - 1
        if self._reads:
            try:
                offer = self._pull(left)
            except Exception as raised:
                # As in torch it is asked again after the next batch, unless there is none to come.
                error, offer = raised, NOTHING if left > 0 else ENDED
        # Nothing is called from here on, so that Ctrl-C does not come in between.
        if offer is ENDED:
            self._reads = False
        elif offer is not NOTHING:
            self._tasks += 1
        self._taken += 1
        delivery.error, delivery.offer, delivery.reached = error, offer, _PULLED
        error = None  # its traceback refers to this frame

    def _count(self, delivery: Delivery, item: Deliver, outcome: Any, waited: float) -> None:
        """In the statistics at most once; in the position exactly once, and last: a state that is saved after Ctrl-C
        says nothing of a batch that has not come.
        """
        first = delivery.reached < _COUNTED
        delivery.reached = _COUNTED
        if not isinstance(outcome, (Answer, OnDevice, Pinned)):
            self._without_answer(delivery, item, outcome, waited if first else None)
            return
        if first:
            if outcome.bad:
                self._statistics.bad(pickle.loads(outcome.bad))
            if self._first:
                self._first = False
                self._statistics.first_batch(self._begun)
            result = outcome.result
            self._statistics.credits = self._scheduler.credits
            self._statistics.batch(result.samples, result.nbytes, result.pickled, waited, result.busy, self._workers)
        self._progress.delivered(item.seq, item.worker, outcome.cursor)
        delivery.reached = _DONE

    def _without_answer(self, delivery: Delivery, item: Deliver, outcome: Any, waited: float | None) -> None:
        """There is no worker's batch: a substitute, `NO_BATCH`, or an error. `waited` is None if it was counted."""
        if isinstance(outcome, WorkerFailure):
            self._progress.failed(item.seq)
            if waited is not None:
                self._statistics.batch(0, 0, 0, waited, outcome.busy, self._workers)
                if outcome.bad:
                    self._statistics.bad(pickle.loads(outcome.bad))
            # Moved: raised, it refers to frames that refer to the outcome.
            delivery.error, outcome.error = outcome.error, None
            return
        if isinstance(outcome, LeftOut):
            batch, records = None, pickle.loads(outcome.bad)
        else:
            assert isinstance(outcome, Poisoned)
            try:
                batch, records = self._quarantine.settle(outcome)
            except Exception as error:
                delivery.error = error
                return
        failed = batch is None and self._plan.ranks > 1
        if failed and isinstance(outcome, LeftOut):
            self._progress.failed(item.seq)
        else:
            self._progress.delivered(item.seq, item.worker, outcome.cursor if isinstance(outcome, LeftOut) else b"")
        if waited is not None:
            self._statistics.bad(records)
        if failed:
            delivery.error = without_batch(self._plan.ranks)
            return
        if batch is not None:
            if self._mover is not None:
                batch = self._mover.take(self._mover.move(batch, locked=False))
            elif self._pins:
                batch = torch_pin(self._pin_device)(batch)
            delivery.batch = batch
        delivery.reached = _DONE

    def hear(self) -> None:
        """Take note of what happened beside the batches. Call it before taking one: a warning may be an error to the
        user, and no batch may be lost over that.
        """
        while self._notices:
            notice = self._notices.popleft()
            if isinstance(notice, Begun):
                self._progress.begun(notice.worker, notice.cursor)
                continue
            if not isinstance(notice, Notice):
                self._statistics.count(notice)
                continue
            if notice.retired:
                self._statistics.retirements += 1
            else:
                self._statistics.restarts += 1
            if notice.warning:
                warnings.warn(notice.warning, RuntimeWarning, stacklevel=4)


def discard(item: Action) -> None:
    """Nobody will take the item; its memory comes back."""
    if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
        item.outcome.discard()
