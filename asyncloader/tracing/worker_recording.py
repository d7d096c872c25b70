"""Records for one trace what several loaders do, each of which has one worker.

Data path: pipeline, consumer of a worker's loader -> [worker_recording] -> recording.

Each loader numbers its batches from 0, and calls its worker 0. Here they get the worker's own number, and numbers that
no other worker's batches have in this epoch: batch B of worker W of N becomes batch B * N + W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncloader.tracing.recording import Recording

if TYPE_CHECKING:
    from asyncloader.errors import WorkerDied
    from asyncloader.workers.listener import Answer
    from asyncloader.workers.source import WorkerHandle


class WorkerRecording(Recording):
    """The recording of the loader of one worker, whose records belong to another recording.

    Args:
        whole: that recording.
        number: the worker's.
        workers: how many there are.
        copies: of this loader's batches out of their rings, before.
    """

    def __init__(self, whole: Recording, number: int, workers: int, copies: int) -> None:
        super().__init__("", None, copies)
        self._whole, self._number, self._workers = whole, number, workers

    @property
    def owned(self) -> bool:
        """False: a loader that ends must not end the trace, which is not its own."""
        return False

    def _numbered(self, seq: int) -> int:
        return seq * self._workers + self._number

    def assigned(self, run: int, seq: int, worker: int, began: float) -> None:  # noqa: ARG002 - it is worker 0
        """Record that the worker was given a task."""
        self._whole.assigned(run, self._numbered(seq), self._number, began)

    def made(self, run: int, worker: int, process: WorkerHandle, answer: Answer, seq: int | None = None) -> None:  # noqa: ARG002
        """Record that a batch has arrived from the worker."""
        number = answer.result.seq if seq is None else seq
        self._whole.made(run, self._number, process, answer, self._numbered(number))

    def ordered(self, run: int, seq: int) -> None:
        """Record that the turn of a batch has come."""
        self._whole.ordered(run, self._numbered(seq))

    def delivered(
        self,
        run: int,
        seq: int,
        worker: int,  # noqa: ARG002 - it is worker 0
        begin: float,
        taken: float,
        ring: Any,
        slot: int,
        copies: int,
    ) -> None:
        """Record that the graph has taken a batch."""
        copied, self._copies = copies > self._copies, copies
        all_copies = self._whole._copies + copied
        self._whole.delivered(run, self._numbered(seq), self._number, begin, taken, ring, slot, all_copies)

    def stage(self, name: str, seconds: float) -> None:
        """Record a span that ends now, of the process that reads the graph."""
        self._whole.stage(name, seconds)

    def event(self, name: str, worker: int | None = None, **figures: Any) -> None:
        """Record an event, of the worker or of its loader."""
        if "batch" in figures:
            figures["batch"] = self._numbered(figures["batch"])
        self._whole.event(name, None if worker is None else self._number, **figures)

    def died(self, worker: int, death: WorkerDied, *, left: bool, lost: bool) -> None:  # noqa: ARG002
        """Record the death of the worker."""
        self._whole.died(self._number, death, left=left, lost=lost)

    def timed_out(self, report: str) -> str:
        """Record that the consumer gets a time-out. Returns a line about the file that was written; may be empty."""
        return self._whole.timed_out(report)
