"""Checks the frames that one worker sends, updates the state of its ring, and notifies the epoch by a `Listener`.

Data path: worker -> channel -> [inbox] -> pipeline.

A worker's frames are not trusted: its memory may be corrupt, or its dataset may have written to our socket. A frame
that contradicts the worker's assignments raises `ValueError`, and changes nothing. An answer of a service's worker is
read completely before its task counts as answered, so that a broken answer is no answer (`WorkerHandle.distrust`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.errors import WorkerDied
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.ring import Ring, oneoff_anchor
from asyncloader.workers.ipc.ring_manager import RingManager
from asyncloader.workers.ipc.template import Template
from asyncloader.workers.source import WorkerHandle
from asyncloader.workers.watchdog import TaskWatchdog


class Answer(NamedTuple):
    """A worker's batch, not decoded yet: in a slot of `ring`, in the one-off segment `fd`, or nowhere (no bytes).

    The receiver must open it (`delivery/opener.py`) or discard it.
    """

    result: wire.Result
    template: Template
    ring: Ring | None
    fd: int | None
    cursor: PackedCursor | None = None
    records: Sequence[SkippedSample] = ()
    """The samples that were dropped or replaced."""
    arrived: float = 0.0
    """When it was received, by `perf_counter`."""
    spans: bytes = b""
    """The spans that the worker sent last, for a trace: of this task, if it asked for them."""

    def discard(self) -> None:
        """Free the memory of a batch that is not wanted."""
        if self.ring is not None:
            self.ring.give_back(self.result.slot)
        if self.fd is not None:
            os.close(self.fd)


class Listener(Protocol):
    """Receives a pool's notifications. Called in the loop's thread, never concurrently."""

    def on_started(self, worker: int, error: Any, cursors: Sequence[PackedCursor | None]) -> None:
        """The worker has begun the epoch: with an error as in `on_error`, or None, and the cursors of its copies of the
        dataset, if they are known already.
        """

    def on_answer(self, worker: int, answer: Answer) -> None:
        """The worker made a batch."""

    def on_error(self, worker: int, seq: int, busy: float, error: Any, records: Sequence[SkippedSample]) -> None:
        """A task raised; `error` is an exception, or torch's wrapper of one."""

    def on_exhausted(self, worker: int, seq: int, cursor: PackedCursor | None) -> None:
        """The worker's copy of an iterable dataset, or of several the one that this task is for, is exhausted; `cursor`
        is its final state.
        """

    def on_empty_batch(
        self, worker: int, seq: int, busy: float, cursor: PackedCursor | None, records: Sequence[SkippedSample]
    ) -> None:
        """A task was carried out, but all of its samples were dropped; `cursor` is the state after it."""

    def on_ask(self, worker: int, number: int, batch: int, left: Any) -> None:
        """The worker requests assignment `number`; answer by `WorkerPool.send_assignment`. See `ShardAssigner.ask`."""

    def on_log(self, level: int, text: str, store: str | None, silent: bool) -> None:
        """The worker has a line for the log; of a store, whether that has gone silent, or answers again."""

    def on_death(
        self, worker: int, death: WorkerDied, *, at_work: bool, saved_rng_state: bytes | None, outside: bool, lost: bool
    ) -> None:
        """The worker ended without being asked to; everything that it had sent was reported before.

        `at_work`: its start-up was over. `saved_rng_state`: its RNG state, if it left because it exceeded its memory
        limit. `outside`: see `WorkerProcess.outside`. `lost`: only the connection failed, the worker may be well.
        """

    def on_failure(self, error: Exception) -> None:
        """The pool itself cannot go on (out of descriptors, a broken stream)."""


class Inbox:
    """Handles the frames of one worker process.

    Args:
        process: the worker.
        rings: the manager of its rings.
        streams: whether it serves several streams of the dataset.
    """

    def __init__(self, process: WorkerHandle, rings: RingManager, *, streams: bool = False) -> None:
        # Each of these ends is understood by the scheduler of such workers only.
        self._answers = (wire.ERROR, wire.ALL_DROPPED, wire.STREAM_ENDED if streams else wire.EXHAUSTED)
        self._process = process
        self._worker = process.worker_id
        self._rings = rings
        self._codec = process.codec
        self._template: Template | None = None
        self._records: Sequence[SkippedSample] = ()  # of the task that is answered next
        self._spans = b""  # of a task; those that came last

    def frame(
        self, kind: int, body: bytes, epoch: int, listener: Listener | None, watchdog: TaskWatchdog | None
    ) -> None:
        """Handle one frame. `epoch` is the current epoch; answers of older ones are discarded.

        Raises:
            ValueError: the frame contradicts the assignments.
            OSError: a descriptor did not arrive.
        """
        process = self._process
        if kind == wire.RESULT:
            self._result(body, epoch, listener, watchdog)
        elif kind == wire.READY:
            process.ready = True
        elif kind == wire.RESET_DONE:
            sent_epoch = self._epoch_in(body, epoch)
            # The epoch that the frame names, not the current one: after an epoch that ended at once, this may answer an
            # earlier RESET.
            self._rings.reset_done(sent_epoch)
            process.outstanding = len(self._rings.tasks)
            if watchdog is not None and sent_epoch == epoch:
                watchdog.cleared(self._worker)
        elif kind == wire.STARTED:
            sent_epoch, error, cursors = wire.unpack_started(body)
            # A frame of an older epoch: the current epoch's start-up code has yet to run.
            if self._check_epoch(sent_epoch, epoch) == epoch:
                process.started = True
                if watchdog is not None:
                    watchdog.started(self._worker)
                if listener is not None:
                    failure = self._codec.load_error(error) if error else None
                    listener.on_started(self._worker, failure, [self._cursor(cursor) for cursor in cursors])
        # The RNG state is a pickle, which only a process of ours may send. From any other worker the frame breaks the
        # stream.
        elif kind == wire.LEAVING and self._codec.trusted:
            process.saved_rng_state = body
        elif kind == wire.ASK:
            sent_epoch, number, batch, left = wire.unpack_ask(body)
            # A request of an older epoch is not answered: the worker drops it when the next epoch begins.
            if sent_epoch == epoch and listener is not None:
                if watchdog is not None:
                    watchdog.asked(self._worker)
                listener.on_ask(self._worker, number, batch, self._codec.loads(left))
        elif kind == wire.SPANS:
            if len(body) > wire.MOST_SPAN_BYTES:
                raise ValueError(f"broken stream: {len(body)} bytes of spans from worker {self._worker}")
            self._spans = body
        elif kind == wire.COUNTS:
            process.recorder.take(body)
        elif kind == wire.LOG and self._codec.trusted:
            if listener is not None:
                listener.on_log(*self._codec.loads(body))
        elif kind == wire.BAD_SAMPLES:
            # Not added up: frames that no answer follows must not grow the list.
            self._records = self._codec.load_records(wire.unpack_answer(body)[3])
        elif kind in self._answers:
            self._answer_without_batch(kind, body, epoch, listener, watchdog)
        else:
            raise ValueError(f"broken stream: a frame of kind {kind} from worker {self._worker}")

    def _epoch_in(self, body: bytes, epoch: int) -> int:
        return self._check_epoch(wire.unpack_reset(body)[0], epoch)

    def _check_epoch(self, sent_epoch: int, epoch: int) -> int:
        if sent_epoch > epoch:
            raise ValueError(
                f"broken stream: worker {self._worker} is ready for epoch {sent_epoch}, and this is {epoch}"
            )
        return sent_epoch

    def _result(self, body: bytes, epoch: int, listener: Listener | None, watchdog: TaskWatchdog | None) -> None:
        result, data, packed = wire.unpack_result(body)
        # Taken before anything is checked: descriptors are matched to frames by their order alone.
        fd = self._process.channel.take_fd() if result.slot == wire.ONEOFF else None
        try:
            cursor = self._codec.load_cursor(packed) if packed else None
            ring, template = self._checked(result, data, fd, epoch)
        # The descriptor belongs to no answer yet.
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        records = self._answered(result.epoch == epoch, result.seq, watchdog)
        answer = Answer(result, template, ring, fd, cursor, records, perf_counter(), self._spans)
        self._process.answers += 1
        # An answer of an epoch that was abandoned still frees its slot.
        if result.epoch == epoch and listener is not None:
            listener.on_answer(self._worker, answer)
        else:
            answer.discard()

    def _checked(self, result: wire.Result, data: bytes, fd: int | None, epoch: int) -> tuple[Ring | None, Template]:
        """Check the answer as far as possible without decoding it. Returns its ring and template."""
        if fd is not None and not 0 < result.nbytes <= os.fstat(fd).st_size:
            size = os.fstat(fd).st_size
            raise ValueError(f"a worker's answer is broken: {result.nbytes} bytes in a segment of {size}")
        if result.epoch >= epoch and (result.epoch, result.seq) not in self._rings.tasks:
            raise self._unexpected(result.epoch, result.seq)
        template = self._template if result.same else self._codec.template(data)
        if template is None:
            raise ValueError(f"a worker's answer is broken: worker {self._worker} has sent no template before")
        ring = self._rings.answered(result.epoch, result.seq, result.slot, result.nbytes)
        # Only now: an answer that is refused leaves the template of the answer before it.
        self._template = template if template.lasting else None
        if self._codec.trusted:
            return ring, template  # its structure is read when the batch is opened
        try:
            if ring is not None:
                template = template.with_structure(lambda: ring.look(result.slot, result.nbytes))
            elif fd is not None:
                template = template.with_structure(lambda: oneoff_anchor(fd, result.nbytes))
        except ValueError:
            if ring is not None:
                # `answered` has removed the slot from the manager's list, so no other code would free it.
                ring.give_back(result.slot)
            raise
        return ring, template

    def _unexpected(self, sent_epoch: int, seq: int) -> ValueError:
        return ValueError(
            f"a worker's answer is broken: worker {self._worker} was not given task {seq} of epoch {sent_epoch}"
        )

    def _answer_without_batch(
        self, kind: int, body: bytes, epoch: int, listener: Listener | None, watchdog: TaskWatchdog | None
    ) -> None:
        worker = self._worker
        sent_epoch, seq, busy, payload = wire.unpack_answer(body)
        if sent_epoch >= epoch and (sent_epoch, seq) not in self._rings.tasks:
            raise self._unexpected(sent_epoch, seq)
        self._rings.answered(sent_epoch, seq, wire.NO_SLOT, 0)
        records = self._answered(sent_epoch == epoch, seq, watchdog)
        if kind == wire.ALL_DROPPED and not records:
            raise ValueError(f"broken stream: worker {worker} dropped all samples of task {seq}, and says of none why")
        if sent_epoch != epoch or listener is None:
            return
        if kind == wire.EXHAUSTED:
            # A worker whose dataset has ended drops its other tasks without an answer.
            self._rings.void()
            self._process.outstanding = 0
            if watchdog is not None:
                watchdog.forget(worker)
            listener.on_exhausted(worker, seq, self._cursor(payload))
        elif kind == wire.STREAM_ENDED:
            listener.on_exhausted(worker, seq, self._cursor(payload))
        elif kind == wire.ALL_DROPPED:
            listener.on_empty_batch(worker, seq, busy, self._cursor(payload), records)
        else:
            listener.on_error(worker, seq, busy, self._codec.load_error(payload), records)
        # Counted last: an answer whose payload cannot be read raised before this line, and is not an answer.
        self._process.answers += 1

    def _cursor(self, data: bytes) -> PackedCursor | None:
        return self._codec.load_cursor(data) if data else None

    def _answered(self, current: bool, seq: int, watchdog: TaskWatchdog | None) -> Sequence[SkippedSample]:
        """Note that a task of the current epoch or an older one was answered. Returns its records of bad samples."""
        self._process.outstanding = len(self._rings.tasks)
        if watchdog is not None and current:
            watchdog.answered(self._worker, seq)
        elif watchdog is not None:
            watchdog.cleared(self._worker)
        records, self._records = self._records, ()
        return records
