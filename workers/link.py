"""The connection between an event loop's thread and one worker thread: frames and values, as objects of this process.

Data path: scheduler -> [link] -> worker thread -> [link] -> reorder.

It has the interface of a worker process's `Channel`, without a socket: frames cross in a queue, and values as they are,
in a table under the number that their frame carries. So nothing is pickled, and a wake-up is only needed where the
other side is not awake already: a system call would release the GIL, which then has to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import struct
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.workers.fetch.dataset_state import CursorPacker, pickle_cursor
from asyncloader.workers.fetch.error_pickle import caught_in
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.codec import Encoded, Encoder
from asyncloader.workers.ipc.leaves import batch_nbytes
from asyncloader.workers.ipc.template import Template

_KEY = struct.Struct("=Q")


class Bell:
    """Has an event loop call a function, once for all that has come by then. Without a loop `ring` does nothing."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = False

    def attach(self, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]) -> None:
        """Call `answer` in this loop from now on, and once for what came before. In the loop's thread."""
        self._answer, self._context = answer, copy_context()
        # In this order: see `ring`.
        self._loop = loop
        self._rung = False
        self.ring()

    def detach(self) -> None:
        """Call nothing from now on, but what was on its way."""
        self._loop = None

    def hush(self) -> None:
        """What has come is being looked at: the next `ring` is a new one."""
        self._rung = False

    def ring(self) -> None:
        """Have the function called. Any thread; first make what there is to see."""
        if self._rung:
            return
        # Before the loop is read: `attach`, in the new loop of another epoch, sets these two in the reverse order. If
        # it comes in between, its own call follows; after a read of the old loop, a mark that came last would stay.
        self._rung = True
        loop = self._loop
        if loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            # Not in the context of the worker thread, which has its `get_worker_info`.
            loop.call_soon_threadsafe(self._answer, context=self._context)


class Table:
    """Values on their way in one direction. One thread puts, in the order of the frames; another takes."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._values)

    def put(self, value: Any) -> bytes:
        """Keep a value. Returns what stands for it in a frame."""
        self._number += 1
        self._values[self._number] = value
        return _KEY.pack(self._number)

    def take(self, data: bytes) -> Any:
        """Take a value out.

        Raises:
            ValueError: it is not there.
        """
        try:
            return self._values.pop(*_KEY.unpack(data))
        except KeyError:
            raise ValueError("broken stream: a value of a worker thread was taken already") from None

    def peek(self, data: bytes) -> Any:
        """Return a value, which stays."""
        return self._values[_KEY.unpack(data)[0]]

    def drop_before(self, data: bytes) -> None:
        """Drop the values that were put before this one, whose frames are void."""
        (number,) = _KEY.unpack(data)
        for earlier in [each for each in list(self._values) if each < number]:  # `list` is atomic: another thread puts
            del self._values[earlier]


class ThreadChannel:
    """One end of a link. See `Channel`; a thread may send at any time, without waiting.

    Args:
        inbox, outbox: the frames to and from this end, as kind and body.
        bell: of this end.
        other: of the other end.
    """

    joins = False

    def __init__(
        self,
        inbox: SimpleQueue[tuple[int, bytes]],
        outbox: SimpleQueue[tuple[int, bytes]],
        bell: Bell,
        other: Bell,
    ) -> None:
        self.ended = False
        """Whether this end is closed: what is sent is dropped, and nothing more is received."""
        self.received = 0
        self._inbox, self._outbox, self.bell, self._other = inbox, outbox, bell, other

    def fileno(self) -> int:
        """Return -1: there is no descriptor. See `listen`."""
        return -1

    def listen(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> Callable[[], object]:
        """Have the loop call this when frames have come. Returns a function that ends that."""
        self.bell.attach(loop, readable)
        return self.bell.detach

    def receive(self, *, wait: bool = False) -> Iterator[tuple[int, bytes]]:
        """Return the frames that have come; none, or after the first has come (`wait`), if there are none."""
        # Before the queue is emptied: a frame that comes now rings again.
        self.bell.hush()
        inbox = self._inbox
        frames = [inbox.get()] if wait else []
        while not inbox.empty():  # nobody else takes from it
            frames.append(inbox.get())
        if self.ended:
            return iter(())
        self.received += len(frames)
        return iter(frames)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a frame. Returns True: nothing has to wait."""
        assert not fds
        if not self.ended:
            self._outbox.put((frame[4], frame[5:]))
            self._other.ring()
        return True

    def send_all(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame."""
        self.send(frame, fds)

    def flush(self) -> bool:
        """Return True: nothing waits."""
        return True

    def take_fd(self) -> int:
        """Raise: no descriptor comes this way."""
        raise OSError("a worker thread has no descriptors to pass")

    def close(self) -> None:
        """End this end, and wake who waits at it. Any thread; idempotent."""
        self.ended = True
        self._inbox.put((wire.STOP, b""))
        self.bell.ring()


def thread_channels() -> tuple[ThreadChannel, ThreadChannel]:
    """Return the loop's end and the worker's end of a new link."""
    here: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
    there: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
    ours, theirs = Bell(), Bell()
    return ThreadChannel(here, there, ours, theirs), ThreadChannel(there, here, theirs, ours)


_MOST_LEFT = 64
"""Values in a table from which on it is looked through for those that will not be taken."""


class ObjectCodec:
    """One side's codec; see `MessageCodec`.

    Args:
        sent: the values that this side sends.
        received: those that it receives.
    """

    trusted = True

    def __init__(self, sent: Table, received: Table) -> None:
        self._received = received
        self.dumps, self.loads = sent.put, received.take

    def load_start(self, data: bytes) -> EpochStart:
        """Return the start of an epoch. Tasks that were sent before are void."""
        self._received.drop_before(data)
        return EpochStart(*self.loads(data))

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """Send an error as the consumer raises it, without its frames: see `error_pickle.caught_in`."""
        return self.dumps(caught_in(error, worker_id, "thread", "a thread"))

    def dump_records(self, records: Sequence[SkippedSample]) -> bytes:
        """Send the records of samples that raised."""
        return self.dumps(records)

    def load_records(self, data: bytes) -> Sequence[SkippedSample]:
        """Return records."""
        records: Sequence[SkippedSample] = self.loads(data)
        return records

    def load_error(self, data: bytes) -> Any:
        """Return an error; the same may be sent several times."""
        self._received.drop_before(data)
        # A copy: an error that is raised refers to the frames that it passed.
        return copy.copy(self._received.peek(data))

    def template(self, data: bytes) -> ObjectTemplate:
        """Return the batch, in place of a template."""
        # The loop's side reads its frames in order. An error of an epoch that was abandoned is not read.
        if len(self._received) > _MOST_LEFT:
            self._received.drop_before(data)
        return ObjectTemplate(self.loads(data))

    def encoder(self) -> ObjectEncoder:
        """Make the encoder of a worker's batches."""
        return ObjectEncoder(self)

    def cursor_packer(self) -> CursorPacker:
        """Return `pickle_cursor`."""
        return pickle_cursor

    def load_cursor(self, data: bytes) -> PackedCursor:
        """Return the cursor."""
        return PackedCursor(data)


class ObjectEncoder(Encoder):
    """Encodes a batch as itself."""

    def __init__(self, codec: ObjectCodec) -> None:
        self._codec = codec  # nothing of the base's, which is for memory that others read

    def encode(self, value: Any) -> Encoded:
        """Return what stands for the batch. Its bytes are counted, and are nowhere else."""
        return Encoded(self._codec.dumps(value), batch_nbytes(value), [], 0)


class ObjectTemplate(Template):
    """A batch that is made already."""

    __slots__ = ("_batch",)

    lasting = False

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def build(self, anchor: Any) -> Any:
        """Return the batch. Every call returns the same."""
        del anchor
        return self._batch
