"""What one worker sends: checked, taken into its ring's books, and told to the epoch.

Data path: worker -> channel -> [inbox] -> pipeline.

A worker's answer may be a lie: its memory may be corrupt, or its dataset may have written to our socket. What it says
of itself is believed only as far as it can be true: else it is a `ValueError`, and nothing is changed.
"""

from __future__ import annotations

import os
import pickle

from asyncloader.workers.ipc import wire
from asyncloader.workers.listener import Answer, Listener
from asyncloader.workers.memory.codec import Template
from asyncloader.workers.memory.ring import Ring
from asyncloader.workers.memory.ring_manager import RingManager
from asyncloader.workers.process import WorkerProcess
from asyncloader.workers.watchdog import TaskWatchdog

__all__ = ["Inbox"]

_ANSWERS = (wire.ERROR, wire.EXHAUSTED, wire.NOTHING)


class Inbox:
    """Takes the frames of one worker process.

    Args:
        process: the worker.
        rings: of its rings.
    """

    def __init__(self, process: WorkerProcess, rings: RingManager) -> None:
        self._process = process
        self._worker = process.worker_id
        self._rings = rings
        self._template: Template | None = None
        self._bad = b""  # records of the task that it answers next

    def frame(
        self, kind: int, body: bytes, epoch: int, listener: Listener | None, watchdog: TaskWatchdog | None
    ) -> None:
        """Take one frame. `epoch` is the present one; what is older is dropped.

        Raises:
            ValueError: it cannot be true.
            OSError: a descriptor was lost on the way.
        """
        process = self._process
        if kind == wire.RESULT:
            self._result(body, epoch, listener, watchdog)
        elif kind == wire.READY:
            process.ready = True
        elif kind == wire.RESET_DONE:
            said = self._epoch_in(body, epoch)
            self._rings.reset_done(said)
            if watchdog is not None and said == epoch:
                watchdog.cleared(self._worker)
        elif kind == wire.STARTED:
            said, error, cursor = wire.unpack_started(body)
            if self._possible(said, epoch) == epoch:
                process.started = True
                if watchdog is not None:
                    watchdog.started(self._worker)
                if listener is not None:
                    listener.on_started(self._worker, error, cursor)
        elif kind == wire.RETIRING:
            process.retired = body
        elif kind == wire.ASK:
            said, number, batch, left = wire.unpack_ask(body)
            if said == epoch and listener is not None:
                if watchdog is not None:
                    watchdog.asked(self._worker)
                listener.on_ask(self._worker, number, batch, pickle.loads(left))
        elif kind == wire.COUNTS:
            if listener is not None:
                listener.on_counts(pickle.loads(body))
        elif kind == wire.BAD:
            self._bad = wire.unpack_answer(body)[3]
        elif kind in _ANSWERS:
            self._answer_without_batch(kind, body, epoch, listener, watchdog)
        else:
            raise ValueError(f"broken stream: a frame of kind {kind} from worker {self._worker}")

    def _epoch_in(self, body: bytes, epoch: int) -> int:
        return self._possible(wire.unpack_reset(body)[0], epoch)

    def _possible(self, said: int, epoch: int) -> int:
        if said > epoch:
            raise ValueError(f"broken stream: worker {self._worker} is ready for epoch {said}, and this is {epoch}")
        return said

    def _result(self, body: bytes, epoch: int, listener: Listener | None, watchdog: TaskWatchdog | None) -> None:
        result, data, cursor = wire.unpack_result(body)
        fd = self._process.channel.take_fd() if result.slot == wire.ONEOFF else None
        try:
            ring, template = self._checked(result, data, fd, epoch)
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        bad = self._answered(result.epoch == epoch, result.seq, watchdog)
        answer = Answer(result, template, ring, fd, cursor, bad)
        if result.epoch == epoch and listener is not None:
            listener.on_answer(self._worker, answer)
        else:
            answer.discard()

    def _checked(self, result: wire.Result, data: bytes, fd: int | None, epoch: int) -> tuple[Ring | None, Template]:
        """The answer's ring and template, once what it says of itself is known to be so, as far as can be seen
        unopened.
        """
        if fd is not None and not 0 < result.nbytes <= os.fstat(fd).st_size:
            size = os.fstat(fd).st_size
            raise ValueError(f"a worker's answer is broken: {result.nbytes} bytes in a segment of {size}")
        self._check_expected(result.epoch, result.seq, epoch)
        template = self._template if result.same else Template(data)
        if template is None:
            raise ValueError(f"a worker's answer is broken: worker {self._worker} has sent no template before")
        ring = self._rings.answered(result.epoch, result.seq, result.slot, result.nbytes)
        self._template = template
        return ring, template

    def _check_expected(self, said: int, seq: int, epoch: int) -> None:
        if said >= epoch and not self._rings.expects(said, seq):
            raise ValueError(
                f"a worker's answer is broken: worker {self._worker} was not given task {seq} of epoch {said}"
            )

    def _answer_without_batch(
        self, kind: int, body: bytes, epoch: int, listener: Listener | None, watchdog: TaskWatchdog | None
    ) -> None:
        worker = self._worker
        said, seq, busy, payload = wire.unpack_answer(body)
        self._check_expected(said, seq, epoch)
        self._rings.answered(said, seq, wire.NO_SLOT, 0)
        bad = self._answered(said == epoch, seq, watchdog)
        if said != epoch or listener is None:
            return
        if kind == wire.EXHAUSTED:
            self._rings.void()
            if watchdog is not None:
                watchdog.forget(worker)
            listener.on_exhausted(worker, seq, payload)
        elif kind == wire.NOTHING:
            listener.on_nothing(worker, seq, busy, payload, bad)
        else:
            listener.on_error(worker, seq, busy, pickle.loads(payload), bad)

    def _answered(self, present: bool, seq: int, watchdog: TaskWatchdog | None) -> bytes:
        """A task was answered, of the present epoch or an older one. Returns its records of bad samples."""
        if watchdog is not None and present:
            watchdog.answered(self._worker, seq)
        elif watchdog is not None:
            watchdog.cleared(self._worker)
        if self._process.suspect is not None:
            self._process.cleared()
        bad, self._bad = self._bad, b""
        return bad
