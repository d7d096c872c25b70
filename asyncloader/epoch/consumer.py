"""Does the per-batch work in the iterating thread, for both loaders: advances the sampler, opens batches, counts them.

Data path: sampler -> [consumer] -> scheduler ... reorder -> delivery -> [consumer] -> the user.

The order per batch is torch's: a plain sampler is advanced after the batch has arrived, and before an error in place of
the batch is raised.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from asyncloader.base.bridge import in_thread
from asyncloader.base.events import (
    NOTHING,
    Action,
    AllDropped,
    CopyBegun,
    Deliver,
    Notice,
    Poisoned,
    WorkerFailure,
)
from asyncloader.base.shielding import shielded
from asyncloader.base.topology import without_batch
from asyncloader.delivery.opener import Opener, raise_worker_error
from asyncloader.delivery.stage import OnDevice, Pinned, PinStage, torch_pin
from asyncloader.epoch.pipeline import Pipeline
from asyncloader.epoch.plan import make_scheduler, replicas_of
from asyncloader.epoch.quarantine import SkippedSampleLog, settle
from asyncloader.epoch.respawn import WorkerRespawner
from asyncloader.epoch.run_reading import tell_verdict
from asyncloader.epoch.sampler_reading import (
    ADVANCED,
    BEGUN,
    COUNTED,
    DONE,
    OPENED,
    OPENING,
    PULLED,
    RELEASED,
    Delivery,
    SamplerReading,
)
from asyncloader.epoch.torch_iterator import TorchIterator
from asyncloader.errors import TaskQuarantined
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.ranks.agreement import AgreementStage
from asyncloader.state.progress import Progress
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.inbox import Answer
from asyncloader.workers.pool import WorkerPool

if TYPE_CHECKING:
    from asyncloader.delivery.device_stage import DeviceStage
    from asyncloader.delivery.transfer import DeviceTransfer

NO_BATCH: Final[Any] = object()
"""Returned instead of a batch whose samples were all dropped: take the next item."""


class Consumer(SamplerReading):
    """The consumer's side of one epoch.

    Args:
        config: the epoch's options, as its workers were started with them.
        torch_iter: torch's iterator base, which has drawn this iterator's random numbers.
        statistics: the loader's counters.
        progress: tracks the iterator's position.
        transfer: copies batches to the device where they are delivered; None for the CPU.
        begun: when the iterator began, from `Statistics.begin`.
    """

    def __init__(
        self,
        config: EpochConfig,
        torch_iter: TorchIterator,
        statistics: Statistics,
        progress: Progress,
        transfer: DeviceTransfer | None = None,
        *,
        begun: float,
    ) -> None:
        self._statistics, self._config = statistics, config
        statistics.tell = partial(tell_verdict, weakref.ref(config))
        self._notices: deque[Notice | CopyBegun] = deque()
        self._progress = progress
        self._tasks = 0  # indices taken from a plain sampler
        self._taken = 0  # deliveries
        self._arrived = 0.0  # when the current delivery's item was taken from the queue
        self._begun = begun
        self._run = statistics.epochs  # number of the iterator, in traces
        self._workers = statistics.num_workers = config.num_workers
        self._source = config.source
        self._replicas = replicas_of(config, torch_iter)
        # Weak: in the sync loader `torch_iter` is the iterator itself, which must die when it is dropped.
        self._torch_iter = weakref.ref(torch_iter)
        # False if there is nothing to advance here: no sampler, or an async one, which a task of the loop reads.
        self._reads = torch_iter.order is not None
        self._first = True
        self.delivery = progress.delivery = Delivery()
        self._opener = Opener(statistics)
        self._pins, self._pin_device = torch_iter._pin_memory, torch_iter._pin_memory_device
        self._transfer = transfer
        self._stage: PinStage | DeviceStage | None = None
        self._skipped = SkippedSampleLog(config.max_skipped_samples, statistics)
        self._agreement = progress.agreement
        self._agreeing: AgreementStage | None = None
        self._adapts = config.reorder_window > 0 or config.credits > config.prefetch_factor
        self.offers = self._prime(config.credits * config.num_workers + config.reorder_window)
        """Indices taken before the first batch; in torch mode the number that torch takes."""

    @property
    def outstanding(self) -> int:
        """Indices that were taken from a plain sampler and not delivered; 0 without one."""
        return max(0, self._tasks - self._taken)

    def pipeline(
        self,
        pool: WorkerPool,
        put: Callable[[Action], None],
        put_from_thread: Callable[[Action], None],
        respawner: WorkerRespawner,
    ) -> Pipeline:
        """Make the epoch's pipeline, for `put`, or `put_from_thread` in a stage's thread."""
        self._scheduler = make_scheduler(self._config, self._progress.next_worker)
        sink = put
        if self._agreement is not None:
            # Made first, because the other stage forwards to it: an error of that stage must reach the other ranks.
            self._agreeing = AgreementStage(self._agreement, put_from_thread, discard)
            sink = put_from_thread = self._agreeing.put
        if self._transfer is not None:
            from asyncloader.delivery.device_stage import DeviceStage  # late: few loaders have a device

            ahead = self._config.device_prefetch
            self._stage = DeviceStage(self._opener, self._transfer, self._statistics, put_from_thread, ahead)
            sink = self._stage.put
        elif self._pins:
            self._stage = PinStage(
                self._opener, torch_pin(self._pin_device), self._statistics.recorder, put_from_thread
            )
            sink = self._stage.put
        indices = None if self._source is None else self._source.read(self._progress)
        pipeline = Pipeline(
            pool,
            self._scheduler,
            sink,
            indices,
            self._progress.ends,
            respawner=respawner,
            loss=self._config.loss,
            replays=self._config.replays,
            stateful=self._config.stateful,
            assigner=None if self._progress.assignment is None else self._progress.assignment.assigner,
            adapts=self._adapts,
            statistics=self._statistics,
        )
        # Shared with the loop's thread without a lock: `append` and `popleft` of a deque are atomic.
        self._notices = pipeline.notices
        return pipeline

    async def end_stage(self) -> None:
        """Let the stage finish its current batch and end, without blocking the loop. It ends even if this is
        cancelled.
        """
        if self._stage is not None:
            # In a thread, because the stage ends only when its current copy has.
            await shielded(in_thread(self._stage.close))

    def close(self, *, wait: bool = True) -> None:
        """End the stages, once their current batch is finished. Without waiting, as for finalizers, an item may still
        be forwarded afterwards.
        """
        # The device's stage first: it passes its last batch on to the agreement.
        for stage in (self._stage, self._agreeing):
            if stage is not None:
                stage.close() if wait else stage.close_soon()
        if self._agreeing is None and self._agreement is not None:
            self._agreement.give_up()  # made, but never iterated

    # ---------------------------------------------------------------------------------------- per batch

    def deliver(self, item: Deliver, waited: float, advance: Callable[[int, Any], None]) -> Any:
        """The batch for the user, or `NO_BATCH`.

        After a KeyboardInterrupt, a second call with the same item continues where the first stopped: the user gets the
        batch, or its error, once, and the sampler is advanced once. The user's own code cannot be continued: a sampler
        that is a generator is read anew up to its position; an `on_error` function, and `collate_fn` after it, are
        called again. The statistics may lack the batch.

        Args:
            item: the pipeline's item.
            waited: seconds that the user waited for it.
            advance: `Pipeline.advance`: reports that the item was taken, and a plain sampler's next index.

        Raises:
            Exception: the worker's error for this batch.
            TooManySkippedSamples: there are more bad samples than allowed. Nothing should be taken any more.
        """
        delivery = self.delivery
        if delivery.item is not item:
            self._arrived = perf_counter()
            # No calls from here on, so that Ctrl-C cannot interrupt it halfway.
            delivery.batch, delivery.error, delivery.descriptors, delivery.offer = NO_BATCH, None, None, NOTHING
            delivery.reached = BEGUN
            delivery.item = item
        if delivery.reached < ADVANCED:
            self._open(delivery, item.outcome)
            if delivery.reached < PULLED:
                self._advance(delivery)
            # Before the statistics and the position are updated, so that the worker has its next task early. If Ctrl-C
            # comes between these two lines, the call is repeated, and `Pipeline.advance` ignores the repetition.
            advance(item.seq, delivery.offer)
            delivery.reached = ADVANCED
        if delivery.error is None and delivery.reached < DONE:
            self._count(delivery, item, item.outcome, waited)
        error = delivery.error
        if error is None:
            return delivery.batch
        self._failed(item)
        try:
            if isinstance(error, BaseException):
                raise error
            raise_worker_error(error)
        finally:
            del error  # its traceback refers to this frame

    def _failed(self, item: Deliver) -> None:
        # A copy, because the loop's thread may add to it now. They are not taken out: `drain_notices` counts and
        # reports them.
        for notice in list(self._notices):
            if isinstance(notice, CopyBegun):  # it came while this item was waited for, and the state needs it
                self._progress.begun(notice.copy, notice.cursor)
        self._progress.failed(item.seq, item.copy, getattr(item.outcome, "cursor", None))

    def abandon(self, item: Deliver) -> None:
        """Free the memory of an item whose delivery was interrupted by Ctrl-C and will not be continued."""
        delivery, outcome = self.delivery, item.outcome
        if delivery.item is not item or delivery.reached < OPENED:
            # No batch was built, or Ctrl-C interrupted that: the slot still belongs to the answer.
            if isinstance(outcome, Answer):
                self._opener.forget(outcome)
            discard(item)
        elif delivery.reached == OPENED and isinstance(outcome, Answer):
            # Ctrl-C came between the batch and the release of its descriptors.
            self._release(delivery, outcome)
        delivery.item, delivery.batch, delivery.error = None, None, None

    def _release(self, delivery: Delivery, answer: Answer) -> None:
        # Kept in the delivery: a repeated call closes only the descriptors that the interrupted call left.
        if delivery.descriptors is None:
            delivery.descriptors = [] if answer.fd is None else [answer.fd]
        self._opener.release(answer, delivery.descriptors)

    def _open(self, delivery: Delivery, outcome: Any) -> None:
        if delivery.reached < OPENED:
            try:
                if isinstance(outcome, Answer):
                    if delivery.reached == OPENING:
                        # Ctrl-C struck while the batch was built, perhaps after its slot was lent. That lease is
                        # undone, and the batch built again.
                        self._opener.forget(outcome)
                    delivery.reached = OPENING
                    batch, held = self._opener.build(outcome)
                    # A batch that views its slot has nothing to release: the slot is freed with the batch's last
                    # tensor.
                    delivery.batch, delivery.reached = batch, OPENED if held is None else RELEASED
                elif isinstance(outcome, OnDevice):
                    delivery.batch = cast("DeviceStage", self._stage).take(outcome)
                elif isinstance(outcome, Pinned):
                    delivery.batch = outcome.batch
            except Exception as error:
                delivery.error, delivery.reached = error, OPENED
        if delivery.reached < RELEASED:
            if isinstance(outcome, Answer):
                self._release(delivery, outcome)
            delivery.reached = RELEASED

    def _count(self, delivery: Delivery, item: Deliver, outcome: Any, waited: float) -> None:
        """Count the batch in the statistics at most once, then in the position exactly once: a state that is saved
        after Ctrl-C must not include a batch that was not delivered.
        """
        first = delivery.reached < COUNTED
        delivery.reached = COUNTED
        if not isinstance(outcome, (Answer, OnDevice, Pinned)):
            self._without_answer(delivery, item, outcome, waited if first else None)
            return
        if first:
            if outcome.records:
                self._skipped.add(outcome.records)
            if self._first:
                self._first = False
                self._statistics.first_batch(self._begun)
            result = outcome.result
            self._statistics.prefetch_depth = self._scheduler.credits
            if (trace := self._statistics.trace) is not None:
                ring = outcome.ring if isinstance(outcome, Answer) else None
                begin, copies = self._arrived - waited, self._statistics.ring_copies
                trace.delivered(self._run, item.seq, item.worker, begin, self._arrived, ring, result.slot, copies)
            waited += perf_counter() - self._arrived
            self._statistics.batch(*(result.samples, result.nbytes, result.pickled, waited, result.busy, self._workers))
        # Before `DONE`: after Ctrl-C between these two lines the call is repeated, which `delivered` ignores.
        copy = item.worker if item.stream is None else item.stream
        self._progress.delivered(item.seq, copy, outcome.cursor)
        delivery.reached = DONE

    def _without_answer(self, delivery: Delivery, item: Deliver, outcome: Any, waited: float | None) -> None:
        """Resolve an outcome without a worker's batch: to `NO_BATCH` or an error. `waited` is None if it was counted
        already.
        """
        if (trace := self._statistics.trace) is not None:
            trace.event("no batch", outcome=type(outcome).__name__, iterator=self._run, batch=item.seq)
        if isinstance(outcome, WorkerFailure):
            # Before the records: they may be too many, and `add` then raises.
            self._failed(item)
            if waited is not None:
                self._statistics.batch(0, 0, 0, waited, outcome.busy, self._workers, batches=0)
                if outcome.records:
                    self._skipped.add(outcome.records)
            # Moved: raised, it refers to frames that refer to the outcome.
            delivery.error, outcome.error = outcome.error, None
            return
        cursor = None
        if isinstance(outcome, AllDropped):
            records, cursor = outcome.records, outcome.cursor
        else:
            assert isinstance(outcome, Poisoned)
            config = self._config
            try:
                records = settle(outcome, config.on_error, batched=config.auto_collation, replicas=self._replicas)
            except TaskQuarantined as error:
                delivery.error = error
                return
        uneven = self._config.even_ranks > 1
        if uneven and isinstance(outcome, AllDropped):
            self._failed(item)
        else:
            self._progress.delivered(item.seq, item.copy, cursor)
        if waited is not None:
            self._skipped.add(records)
        if uneven:
            delivery.error = without_batch(self._config.even_ranks)
            return
        delivery.reached = DONE

    def drain_notices(self) -> None:
        """Process notices about workers."""
        # Call it before taking a batch: the user may have turned warnings into errors, and no batch may be lost to one.
        while self._notices:
            notice = self._notices.popleft()
            if isinstance(notice, CopyBegun):
                self._progress.begun(notice.copy, notice.cursor)
                continue
            if notice.left:
                self._statistics.worker_retirements += 1
            else:
                self._statistics.worker_restarts += 1
            if notice.warning:
                warnings.warn(notice.warning, RuntimeWarning, stacklevel=4)
        # Taken out before it is raised, so that it is raised once.
        warning, self._opener.warning = self._opener.warning, None
        if warning is not None:
            raise warning


def discard(item: Action) -> None:
    """Free the memory of an item that will not be delivered."""
    if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
        item.outcome.discard()
