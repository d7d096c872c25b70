"""Answers a worker's tasks that have no batch: by the error, the end of the stream, or the records of dropped samples.

Data path: channel -> task_runner: fetch -> [error_answers] -> channel.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.base.events import SkippedSample
from asyncloader.errors import is_tried_again
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.dataset_state import bytes_of
from asyncloader.workers.fetch.error_pickle import PickledStartError
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import NoSamples
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.message_codec import MessageCodec
from asyncloader.workers.stream_readers import StreamReaders


class ErrorAnswers:
    """The base of `TaskRunner`, which carries out the tasks."""

    worker_id: int
    channel: Channel
    _codec: MessageCodec
    _reader: DatasetReader | StreamReaders | None
    _ended: bool

    def _send_skipped_samples(self, epoch: int, seq: int, records: list[SkippedSample]) -> None:
        """Send the records of a task's bad samples. The task's answer must follow."""
        self.channel.send_all(wire.pack_answer(wire.BAD_SAMPLES, epoch, seq, 0.0, self._codec.dump_records(records)))

    def _answer_error(
        self, epoch: int, seq: int, busy: Callable[[], float], error: BaseException, records: list[SkippedSample]
    ) -> None:
        if records and not is_tried_again(error):  # else the epoch ends, and the batch is made again by another
            self._send_skipped_samples(epoch, seq, records)
        if isinstance(error, NoSamples):
            cursor = self._reader.cursor() if self._reader is not None else None
            self.channel.send_all(wire.pack_answer(wire.ALL_DROPPED, epoch, seq, busy(), bytes_of(cursor)))
            return
        if isinstance(error, EndOfData):
            # Unless it serves several streams, the main process voids all other tasks of this worker when it reads the
            # answer, so none of them may be answered.
            self._ended = not isinstance(self._reader, StreamReaders)
            kind = wire.EXHAUSTED if self._ended else wire.STREAM_ENDED
            cursor = self._reader.last_cursor() if self._reader is not None else None
            self.channel.send_all(wire.pack_answer(kind, epoch, seq, busy(), bytes_of(cursor)))
            return
        if isinstance(error, PickledStartError):
            payload = error.payload
        else:
            if not isinstance(error, Exception):  # it would end the main process
                error = not_the_end(error, "the dataset's code")
            payload = self._codec.dump_error(error, self.worker_id)
            if self._reader is not None and not is_tried_again(error):
                # An error that the user's code raised counts as an answer; a start-up error does not, because nothing
                # was read.
                self._reader.failed()
                if not self._reader.begun:
                    self.channel.send_all(wire.pack_started(epoch, payload, []))
        self.channel.send_all(wire.pack_answer(wire.ERROR, epoch, seq, busy(), payload))
