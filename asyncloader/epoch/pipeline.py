"""Runs the scheduler for one epoch: carries out its actions and feeds it the events that result.

Data path: sampler -> [pipeline: scheduler -> pool -> scheduler] -> delivery -> consumer.

One pipeline serves one iterator, in one event loop's thread. Items for the consumer leave through `sink`, in order:
`Deliver` for each batch, and finally `Finish` or `Fail`. The consumer answers each delivery with `advance`, which also
passes on the sampler's next index (a plain sampler is advanced in the consumer's thread, see `consumer.py`).

`report` describes the task that the epoch waits for. It is used for the text of a timeout error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from itertools import starmap
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncloader.base.events import (
    ENDED,
    NOTHING,
    Action,
    AllDropped,
    Assign,
    CopyBegun,
    Deliver,
    Died,
    Fail,
    Finish,
    Notice,
    PackedCursor,
    Pull,
    Replace,
    SamplerFailed,
    SkippedSample,
    WorkerFailure,
)
from asyncloader.delivery.opener import raise_worker_error
from asyncloader.epoch.respawn import Request, WorkerRespawner
from asyncloader.epoch.resume_points import ResumePoints
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.epoch.timeout_report import report
from asyncloader.errors import WorkerDied, ending, is_tried_again
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.context import UnexpectedCancellation
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.inbox import Answer, Listener
from asyncloader.workers.ipc import wire
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.source import WorkerHandle, shortage_of

if TYPE_CHECKING:
    from asyncloader.remote.assignment import Reply, ShardAssigner

_log = logging.getLogger("asyncloader")


class Pipeline(Listener):
    """Drives one epoch, in its loop's thread.

    Args:
        pool: started workers.
        scheduler: a fresh one for this epoch.
        sink: receives the items for the consumer; must not block.
        source: an async source of indices; None if the consumer passes them in, or the dataset is iterable.
        ends: filled with the final state of each copy of an iterable dataset.
        respawner: starts replacements for workers that died.
        loss: the part of its predecessor's state that a replacement lacks, for the warning; empty: none, and it makes
            the same batches.
        replays: whether a stream without a state may be read again from its beginning.
        stateful: whether the dataset has a state of its own.
        assigner: assigns shards to the workers; None if the dataset has no shards to assign.
        adapts: whether credits follow how many batches the rings have room for.
        statistics: the loader's counters.
    """

    def __init__(
        self,
        pool: WorkerPool,
        scheduler: Scheduler,
        sink: Callable[[Action], None],
        source: AsyncIterable[Any] | None,
        ends: dict[int, PackedCursor | None],
        *,
        respawner: WorkerRespawner,
        loss: str,
        replays: bool,
        stateful: bool,
        assigner: ShardAssigner | None,
        adapts: bool,
        statistics: Statistics,
    ) -> None:
        # Plain values, without a reference to a sampler or dataset: those may refer to the loader and so to the
        # iterator, which the loop must not keep alive.
        self._ends = ends
        self._adapts = adapts
        self._statistics = statistics
        self._at_nodes = pool.start_method == "service"
        self._run, self._pool = self._statistics.epochs, pool  # the iterator's number is for traces
        self._scheduler, self._sink, self._source = scheduler, sink, source
        self._offers: deque[Any] = deque()
        self._allowed = 0  # how many more indices the scheduler has requested
        self._allow: asyncio.Event | None = None
        self._reader: asyncio.Task[None] | None = None
        self._source_error: Exception | None = None
        self._closed = self._delivers = False  # the consumer gets no items any more; it got one
        self._advanced: int | None = None  # the last delivery that was taken
        self._respawner = respawner
        self._loss, self._replays, self._stateful = loss, replays, stateful
        self._resumes = scheduler.iterable or stateful  # else each worker makes any batch, whatever it made before
        self._assigner = assigner
        self._resume_points: ResumePoints | None = None  # None: not started
        self._starts: list[EpochStart] = []
        self._deaths: dict[int, tuple[WorkerDied, bool]] = {}  # of workers that may be replaced; whether lost
        self._saved_rng_states: dict[int, bytes | None] = {}  # of workers that left; None: it was killed
        self._unbegun: set[int] = set()  # workers that have not begun the epoch yet
        # Made in the consumer's thread: an event belongs to a loop only from the first task that waits for it.
        self._begun = asyncio.Event()
        self._start_errors: dict[int, Any] = {}  # of the workers that could not begin the epoch
        self.notices: deque[Notice | CopyBegun] = deque()
        """For the consumer's thread: replaced workers, and started ones."""

    # ------------------------------------------------------------------------------- called by the consumer

    def start(self, offers: Iterable[Any], starts: Sequence[EpochStart]) -> None:
        """Attach to the running loop and give the workers their first tasks. The consumer gets the error of that."""
        if self._closed:
            return
        try:
            self._start(offers, starts)
        except Exception as error:
            self._fail(error)

    def _start(self, offers: Iterable[Any], starts: Sequence[EpochStart]) -> None:
        loop = asyncio.get_running_loop()
        self._respawner.attach(self._on_made)
        self._starts = list(starts)
        self._resume_points = ResumePoints(
            starts,
            iterable=self._scheduler.iterable,
            replays=self._replays,
            stateful=self._stateful,
            assigns=self._assigner is not None,
        )
        # The number is in each task, so it is set before the first.
        self._scheduler.epoch = self._pool.attach(loop, self, starts)
        self._unbegun.update(range(len(starts)))
        if self._source is not None:
            self._allow = asyncio.Event()
            # Kept in an attribute, because the loop refers to its tasks weakly.
            self._reader = loop.create_task(self._read(self._source))
        if self._adapts:
            # Before the first tasks: in an earlier epoch, the rings of persistent workers may have grown and lost
            # slots.
            self._adapt()
        self._offers.extend(offers)
        self._handle(self._scheduler.started)

    def advance(self, seq: int, offer: Any) -> None:
        """Take note that `seq` was delivered, and of the sampler's `offer`: an index, `ENDED`, `NOTHING`, or a
        `SamplerFailed`. Idempotent.
        """
        if self._closed or seq == self._advanced:
            return
        self._advanced = seq
        if offer is not NOTHING:
            self._offers.append(offer)
        try:
            self._carry_out(self._scheduler.delivered(seq))
            if self._offers and self._allowed:
                # Indices that were requested earlier, when the sampler had not given them yet: no new request names
                # them.
                self._offer()
        except Exception as error:
            self._fail(error)

    def close(self) -> asyncio.Task[None] | None:
        """Stop at once. Returns the cancelled task that reads an async source, to be awaited; the next call: None."""
        self._stop()
        # Not awaited here: `close` is also called in places that cannot wait.
        reader, self._reader = self._reader, None
        return reader

    def _stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        # `begun` must not wait for workers that are not listened to any more.
        self._begun.set()
        # Before the pool is detached: a process that is made from now on is discarded, not adopted.
        self._respawner.close()
        self._pool.detach()
        # The slots of these batches would never be freed otherwise.
        for held in self._scheduler.abandon():
            if isinstance(held.outcome, Answer):
                held.outcome.discard()
        if self._reader is not None:
            self._reader.cancel()

    async def begun(self) -> Any:
        """Wait until every worker has begun the epoch. Returns the error of one that could not, as `raise_worker_error`
        takes it, or None. Also returns when a worker dies or the pipeline stops; the consumer then gets that error with
        its next item.
        """
        if self._unbegun:
            await self._begun.wait()
        return next(iter(self._start_errors.values()), None)

    async def report(self) -> str:
        """Describe the task that is waited for, and each worker. Takes a second at most."""
        return await report(self._pool, self._scheduler)

    # ---------------------------------------------------------------------------------- called by the pool

    def on_started(self, worker: int, error: Any, cursors: Sequence[PackedCursor | None]) -> None:
        """Record that the worker has begun the epoch. See `Listener`."""
        if error is not None:  # of an asynchronous dataset it may come with the first task
            self._start_errors[worker] = error
        if worker not in self._unbegun:
            return  # a replacement: it begins behind answers that are not delivered yet
        if cursors and self._resume_points is not None:
            self.notices += starmap(CopyBegun, self._resume_points.began(worker, cursors))
        self._unbegun.discard(worker)
        if error is not None or not self._unbegun:
            self._begun.set()

    def on_answer(self, worker: int, answer: Answer) -> None:
        """Pass a batch to the scheduler. See `Listener`."""
        if self._scheduler.over:
            answer.discard()  # it was in flight when the epoch failed
            return
        if self._resumes and self._resume_points is not None:
            self._resume_points.answered(self._scheduler.copy(worker, answer.result.seq), answer.cursor)
        if self._adapts:
            # Before the scheduler gets the answer, and requests more: a larger ring may follow, with fewer slots.
            self._adapt()
        result, trace = answer.result, self._statistics.trace
        self._statistics.note_transfer(answer.arrived - result.sent)
        if trace is not None:
            trace.made(self._run, worker, self._pool.processes[worker].place, answer)
        if self._at_nodes:
            self._statistics.came_from_node(worker, result.nbytes, result.busy)
        if result.slot == wire.ONEOFF:
            rings = self._pool.rings[worker]
            self._statistics.came_oneoff(result.nbytes, rings.too_small_for(result.nbytes), rings.ring_bytes)
        self._completed(worker, result.seq, answer)

    def _completed(self, worker: int, seq: int, outcome: Answer | WorkerFailure | AllDropped) -> None:
        try:
            self._carry_out(self._scheduler.completed(worker, seq, outcome))
        except Exception as error:
            self._fail(error)
        if self._assigner is not None:
            self._send_assignments(self._assigner.answered(worker))

    def on_error(self, worker: int, seq: int, busy: float, error: Any, records: Sequence[SkippedSample]) -> None:
        """Pass a task's error to the scheduler. See `Listener`."""
        if is_tried_again(error):
            # A store failed. At once, and not behind earlier tasks: other workers may wait for shards that this one
            # would ask for first. No state counts the task: a loop that goes on from the last delivery makes it again.
            if not self._scheduler.over:
                self._fail(error)
            return
        if self._resume_points is not None:
            self._resume_points.failed(self._scheduler.copy(worker, seq))
        self._completed(worker, seq, WorkerFailure(error, busy, records, unbegun=worker in self._start_errors))

    def on_empty_batch(
        self, worker: int, seq: int, busy: float, cursor: PackedCursor | None, records: Sequence[SkippedSample]
    ) -> None:
        """Pass a task without a batch to the scheduler. See `Listener`."""
        if self._resume_points is not None:
            self._resume_points.answered(self._scheduler.copy(worker, seq), cursor)
        self._completed(worker, seq, AllDropped(busy, cursor, records))

    def on_exhausted(self, worker: int, seq: int, cursor: PackedCursor | None) -> None:
        """Pass the end of a worker's stream to the scheduler. See `Listener`."""
        if cursor is not None:
            self._ends[self._scheduler.copy(worker, seq)] = cursor
        self._handle(self._scheduler.exhausted, worker, seq)

    def on_ask(self, worker: int, number: int, batch: int, left: Any) -> None:
        """Answer a worker's request for shards. See `Listener`."""
        if self._assigner is None:
            raise ValueError(f"broken stream: worker {worker} asks for shards, and the dataset has none to assign")
        self._send_assignments(self._assigner.ask(worker, number, batch, left))

    def on_log(self, level: int, text: str, store: str | None, silent: bool) -> None:
        """Log a worker's line. See `Listener`."""
        self._statistics.relay(level, text, store, silent=silent)

    def _send_assignments(self, replies: Sequence[Reply]) -> None:
        for worker, number, assignment, over, last in replies:
            plain = None if assignment is None else [tuple(shard_range) for shard_range in assignment]
            self._pool.send_assignment(worker, self._pool.epoch, number, (plain, over, last))

    def on_death(
        self, worker: int, death: WorkerDied, *, at_work: bool, saved_rng_state: bytes | None, outside: bool, lost: bool
    ) -> None:
        """Pass a worker's death to the scheduler. See `Listener`."""
        # Kept until `_replace`, which the scheduler may ask for in `_handle` below.
        if (trace := self._statistics.trace) is not None:
            trace.died(worker, death, left=saved_rng_state is not None, lost=lost)
        self._saved_rng_states[worker] = saved_rng_state
        self._deaths[worker] = death, lost
        # `begun` must not wait for this worker: the consumer gets the death with its next item.
        self._begun.set()
        # Before the worker is replaced: a reply to the dead process must not reach the replacement, which asks again.
        if self._assigner is not None:
            self._assigner.died(worker)
        # Found out before the scheduler decides: it is pure, and cannot ask the pool.
        obstacle = "" if self._resume_points is None else self._resume_points.obstacle(worker)
        obstacle = obstacle or self._pool.obstacle()
        event = Died(worker, death, at_work, saved_rng_state is not None, obstacle, outside, lost)
        self._handle(self._scheduler.died, event)

    def on_failure(self, error: Exception) -> None:
        """Pass the pool's failure to the scheduler. See `Listener`."""
        self._begun.set()
        self._handle(self._scheduler.fail, error)

    def _replace(self, worker: int) -> None:
        start = self._starts[worker] if self._resume_points is None else self._resume_points.start(worker)
        saved = self._saved_rng_states.pop(worker, None)
        left, rng_state, warning = saved is not None, saved or b"", ""
        if self._loss and not rng_state:
            warning = f"DataLoader worker {worker} died and was replaced. {self._loss}"
        self.notices.append(Notice(left, warning))
        death, lost = self._deaths.pop(worker)
        if lost and death.reason:  # without a reason, its source has said why
            ended = "" if death.exitcode is None else f" Its process died: {ending(death.exitcode)}."
            _log.warning("worker %d goes on elsewhere. %s%s", worker, death.reason, ended)
        elif not lost:
            why = "its memory had grown beyond worker_memory_limit" if left else ending(death.exitcode)
            reason = f"{why}. {death.reason}".removesuffix(". ") if death.pid else death.reason
            who = f"pid {death.pid}" if death.pid else "a thread"
            _log.log(logging.INFO if left else logging.WARNING, "worker %d (%s) is replaced: %s", worker, who, reason)
        self._respawner.request(Request(worker, start, rng_state, self._pool.epoch))

    def _on_made(self, made: WorkerHandle | Exception) -> None:
        """Take a replacement, or the error that prevented it."""
        try:
            if isinstance(made, Exception):
                raise made
            adopted = self._pool.adopt(made)
        except Exception as error:
            self._handle(self._scheduler.fail, error)
            return
        if adopted:
            if (trace := self._statistics.trace) is not None:
                trace.event("worker replaced", made.worker_id, place=made.place)
            self._handle(self._scheduler.replaced, made.worker_id)
        else:  # Ctrl-C right after it was made caused it to be made a second time
            self._respawner.discard_soon(made)

    # ------------------------------------------------------------------------------------- running the scheduler

    def _handle(self, decide: Callable[..., list[Action]], *arguments: Any) -> None:
        """Carry out what a method of the scheduler decides."""
        try:
            self._carry_out(decide(*arguments))
        except Exception as error:
            self._fail(shortage_of(error, len(self._pool.processes)) or error)

    def _fail(self, error: Exception) -> None:
        """End the epoch with this error, which the consumer gets. `close` follows, and waits for the sampler's end."""
        self._sink(Fail(error))
        self._stop()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                if isinstance(action.outcome, Answer):
                    self._statistics.note_order(perf_counter() - action.outcome.arrived)
                    if (trace := self._statistics.trace) is not None:
                        trace.ordered(self._run, action.seq)
                elif not self._delivers and isinstance(action.outcome, WorkerFailure) and action.outcome.unbegun:
                    raise_worker_error(action.outcome.error)  # no batch's error: the epoch has not begun
                self._delivers = True
                self._sink(action)
            elif isinstance(action, Assign):
                task, trace = action.task, self._statistics.trace
                began = 0.0 if trace is None else perf_counter()
                self._pool.assign(action.worker, task.epoch, task.seq, task.index)
                if trace is not None:
                    trace.assigned(self._run, task.seq, action.worker, began)
                if self._adapts:
                    # `assign` may have sent a ring with fewer slots, because memory is short.
                    self._adapt()
            elif isinstance(action, Pull):
                self._allowed += action.number
                self._offer()
            elif isinstance(action, Replace):
                self._replace(action.worker)
            elif isinstance(action, Finish) and self._source_error is not None:
                # Only at the end: the batches that were requested before the error were delivered first.
                self._sink(Fail(self._source_error))
            else:
                self._sink(action)

    def _adapt(self) -> None:
        # Update run-ahead and credits: larger rings have fewer slots.
        self._scheduler.reorder_window, self._scheduler.credits = self._pool.reorder_window, self._pool.credits

    def _offer(self) -> None:
        # Pass on the requested indices, as far as they are available.
        if self._allow is not None:
            # The task that reads the source passes the indices on by itself.
            self._allow.set()
            return
        while self._allowed and self._offers:
            self._allowed -= 1
            offer = self._offers.popleft()
            if isinstance(offer, SamplerFailed):
                self._source_error, offer = offer.error, ENDED
            # Not `_handle`, within which this runs: an error must also end the outer loop over actions.
            scheduler = self._scheduler
            self._carry_out(scheduler.sampler_ended() if offer is ENDED else scheduler.offered(offer))

    async def _read(self, source: AsyncIterable[Any]) -> None:
        """Read the async source ahead, as far as credits allow."""
        assert self._allow is not None
        try:
            with UnexpectedCancellation("the sampler's"):
                await self._allow.wait()
                indices = aiter(source)
                try:
                    began = perf_counter()
                    async for index in indices:
                        self._statistics.note_sampler(perf_counter() - began)
                        self._allowed -= 1
                        self._handle(self._scheduler.offered, index)
                        if not self._allowed:
                            # No request is lost: one that this index led to is in `_allowed` by now.
                            self._allow.clear()
                            await self._allow.wait()
                        began = perf_counter()
                finally:
                    # Closed in this task, not later by the loop's hook for abandoned generators.
                    if isinstance(indices, AsyncGenerator):
                        await indices.aclose()
        except Exception as error:  # raised to the consumer after the batches that were asked for before it
            self._source_error = error
        if not self._closed:
            self._handle(self._scheduler.sampler_ended)
