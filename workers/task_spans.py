"""Switches the spans of a worker's tasks on and off, as its tasks ask for them.

Data path: task_runner -> [task_spans] -> tracing.spans -> channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncloader.telemetry.counters import Recorder
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel

if TYPE_CHECKING:
    from asyncloader.telemetry.spans import SpanLog


class TracedTasks:
    """The spans of one worker.

    Args:
        recorder: the worker's.
        shared: whether several workers share the process.
    """

    def __init__(self, recorder: Recorder, *, shared: bool) -> None:
        self._recorder = recorder
        self._shared = shared
        self.log: SpanLog | None = None
        """Notes the spans, while tasks ask for them."""

    def begin(self, sent: float, begin: float) -> float:
        """Begin the spans of a task that asks for them, or end those of the worker. Returns when the task was sent."""
        if sent >= 0.0:
            self.close()
            return sent
        if self.log is None:
            from asyncloader.telemetry.spans import SpanLog  # late: few runs are traced

            self.log = SpanLog(self._recorder, process=self._shared)
        self.log.begin(-sent, begin)
        return -sent

    def close(self) -> None:
        """Note nothing more."""
        if self.log is not None:
            self.log.stop()
            self.log = None

    def before(self, answer: bytes, channel: Channel, epoch: int, seq: int) -> bytes:
        """Return the bytes to send for an answer: the spans of the current task, if it has any, then the answer."""
        spans = b"" if self.log is None else self.log.answered(epoch, seq)
        if not spans:
            return answer
        frame = wire.pack(wire.SPANS, spans)
        if channel.joins:
            return frame + answer  # one wake-up of the main process
        channel.send_all(frame)
        return answer
