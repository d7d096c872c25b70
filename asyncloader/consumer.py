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

from asyncloader.agreement_stage import AgreementStage
from asyncloader.delivery import LARGE, Opener, raise_worker_error
from asyncloader.device.mover import Mover
from asyncloader.device.stage import DeviceStage, OnDevice
from asyncloader.draws import Draws
from asyncloader.epoch_plan import EpochPlan
from asyncloader.events import Action, Deliver, Poisoned
from asyncloader.pin_memory import Pinned, PinStage, torch_pin
from asyncloader.pipeline import ENDED, NOTHING, Begun, LeftOut, Notice, Pipeline, WorkerFailure
from asyncloader.progress import Progress
from asyncloader.quarantine import Quarantine
from asyncloader.replacing import Replacer
from asyncloader.seeded_mode import without_batch
from asyncloader.statistics import Statistics
from asyncloader.workers.listener import Answer
from asyncloader.workers.pool import WorkerPool

__all__ = ["NO_BATCH", "Consumer", "discard"]

NO_BATCH: Final[Any] = object()
"""In place of a batch all of whose samples were left out: take the next one."""


class _Delivery:
    """How far an item's delivery has come: Ctrl-C may end the call, and the next one goes on."""

    __slots__ = ("advanced", "batch", "begun", "done", "item")

    def __init__(self, item: Deliver) -> None:
        self.item = item
        self.begun = False
        self.batch: Any = NO_BATCH  # until it is opened
        self.advanced = False
        self.done = False


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
        self._tasks = 0  # indices given out
        self._begun = statistics.begin()
        # Nothing here keeps `draws`, which in the sync loader is the iterator itself: it must die when dropped.
        self._workers = plan.workers
        self._source = plan.source
        self._scheduler = plan.scheduler(progress.turn)
        self._draws = weakref.ref(draws)
        # False when there is nothing to advance here: no sampler, or one that a task of the loop reads.
        self._reads = draws.order is not None
        self._outstanding = 0  # indices given out and not delivered; only counted where there is a plain sampler
        self._first = True
        self.delivery: _Delivery | None = None
        """The one that is under way. Who calls `deliver` sets it to None when the batch is the user's."""
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
        return max(0, self._outstanding)

    def _prime(self, count: int) -> list[Any]:
        offers: list[Any] = []
        while self._reads and len(offers) < count and (offer := self._pull()) is not NOTHING:
            offers.append(offer)
        return offers

    def _pull(self) -> Any:
        draws = self._draws()
        assert draws is not None
        try:
            step, offer = draws.pull()
        except StopIteration:
            if self._outstanding:
                return NOTHING  # as in torch it is asked again after the next batch
            self._reads = False
            return ENDED
        self._progress.pulled(self._tasks, step)
        self._tasks += 1
        self._outstanding += 1
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
            leases=None if self._progress.leases is None else self._progress.leases.book,
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

    def open(self, item: Deliver) -> Any:
        """The batch; None when there is an error in its place, which `deliver` will raise."""
        outcome = item.outcome
        if isinstance(outcome, Answer):
            return self._opener.open(outcome)
        if isinstance(outcome, OnDevice):
            assert isinstance(self._stage, DeviceStage)
            return self._stage.take(outcome)
        return outcome.batch if isinstance(outcome, Pinned) else None

    def deliver(
        self,
        item: Deliver,
        waited: float,
        tell: Callable[[int, Any], None],
        opened: Callable[[], Any] | None = None,
    ) -> Any:
        """The batch for the user, or `NO_BATCH`.

        After a KeyboardInterrupt, called again with the same item, it goes on where it was: the batch is opened, the
        sampler advanced and the delivery counted once.

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
        if delivery is None or delivery.item is not item:
            delivery = self.delivery = _Delivery(item)
        try:
            return self._delivered(delivery, waited, tell, opened)
        except Exception:
            self.delivery = None
            raise

    def _delivered(
        self,
        delivery: _Delivery,
        waited: float,
        tell: Callable[[int, Any], None],
        opened: Callable[[], Any] | None,
    ) -> Any:
        item = delivery.item
        if delivery.done:
            return delivery.batch
        try:
            try:
                if delivery.batch is NO_BATCH:
                    again, delivery.begun = delivery.begun, True
                    if again:
                        self._opener.forget(item.outcome)
                    delivery.batch = self.open(item) if opened is None else opened()
            except Exception:
                self._advance(delivery, tell)  # the credit must not be lost
                raise
            if not delivery.advanced:
                self._advance(delivery, tell)
        except Exception:
            self._progress.failed(item.seq)
            raise
        outcome = item.outcome
        if not isinstance(outcome, (Answer, OnDevice, Pinned)):
            return self._without_answer(item, outcome, waited)
        if outcome.bad:
            self._statistics.bad(pickle.loads(outcome.bad))
        if self._first:
            self._first = False
            self._statistics.first_batch(self._begun)
        result = outcome.result
        self._statistics.credits = self._scheduler.credits
        self._statistics.batch(result.samples, result.nbytes, result.pickled, waited, result.busy, self._workers)
        # Last: a state that is saved after Ctrl-C says nothing of a batch that has not come.
        self._progress.delivered(item.seq, item.worker, outcome.cursor)
        delivery.done = True
        return delivery.batch

    def _without_answer(self, item: Deliver, outcome: Any, waited: float) -> Any:
        """There is no worker's batch: a substitute, `NO_BATCH`, or an error."""
        if isinstance(outcome, WorkerFailure):
            self._progress.failed(item.seq)
            self._statistics.batch(0, 0, 0, waited, outcome.busy, self._workers)
            if outcome.bad:
                self._statistics.bad(pickle.loads(outcome.bad))
            raise_worker_error(outcome.take())
        if isinstance(outcome, LeftOut) and self._plan.ranks > 1:
            self._statistics.bad(pickle.loads(outcome.bad))
            self._progress.failed(item.seq)
            raise without_batch(self._plan.ranks)
        if isinstance(outcome, LeftOut):
            self._progress.delivered(item.seq, item.worker, outcome.cursor)
            self._statistics.bad(pickle.loads(outcome.bad))
            return NO_BATCH
        assert isinstance(outcome, Poisoned)
        try:
            batch, records = self._quarantine.settle(outcome)
        except BaseException:
            self._progress.failed(item.seq)
            raise
        self._progress.delivered(item.seq, item.worker)
        self._statistics.bad(records)
        if batch is None and self._plan.ranks > 1:
            raise without_batch(self._plan.ranks)
        if batch is None:
            return NO_BATCH
        if self._mover is not None:
            return self._mover.take(self._mover.move(batch, locked=False))
        return torch_pin(self._pin_device)(batch) if self._pins else batch

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

    def _advance(self, delivery: _Delivery, tell: Callable[[int, Any], None]) -> None:
        offer: Any = NOTHING
        self._outstanding -= 1
        try:
            if self._reads:
                offer = self._pull()
        except BaseException:
            # As in torch, the sampler is asked again after the next batch, unless there is none to come.
            if self._outstanding <= 0:
                self._reads, offer = False, ENDED
            raise
        finally:
            delivery.advanced = True
            tell(delivery.item.seq, offer)


def discard(item: Action) -> None:
    """Nobody will take the item; its memory comes back."""
    if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
        item.outcome.discard()
