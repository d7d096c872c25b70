"""Messages between the main process and a worker: their bytes. Pure: no sockets.

Data path: scheduler -> [wire] -> worker -> [wire] -> reorder. Batches themselves travel through memory; what goes over
the socket is a descriptor of a few dozen bytes.

A frame is ``length (u32, of what follows) | kind (u8) | head (fixed, by kind) | body (the rest)``. Several frames may
come in one read, and one frame in several. Both ends are our own processes on one machine, of one version: native byte
order, no version field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "ERROR",
    "EXHAUSTED",
    "NO_SLOT",
    "ONEOFF",
    "READY",
    "RESET",
    "RESET_DONE",
    "RESULT",
    "RING",
    "STOP",
    "TASK",
    "FrameSplitter",
    "Result",
    "pack",
    "pack_answer",
    "pack_reset",
    "pack_result",
    "pack_ring",
    "pack_task",
    "unpack_answer",
    "unpack_reset",
    "unpack_result",
    "unpack_ring",
    "unpack_task",
]

# main -> worker
TASK, RING, RESET, STOP = 1, 2, 3, 4
# worker -> main
RESULT, ERROR, EXHAUSTED, RESET_DONE, READY = 11, 12, 13, 14, 15

NO_SLOT = -1
"""In a task: no slot was free. In a result: the batch has no bytes in shared memory."""
ONEOFF = -2
"""In a result: the batch is in a segment of its own, whose descriptor came with the frame."""

_PREFIX = struct.Struct("=IB")
_TASK = struct.Struct("=IBIQiI")  # prefix, epoch, seq, slot, ring
_TASK_HEAD = struct.Struct("=IQiI")
_RING_HEAD = struct.Struct("=IIQ")  # number, slots, slot_bytes
_RESET_HEAD = struct.Struct("=I")  # epoch
_ANSWER_HEAD = struct.Struct("=IQd")  # epoch, seq, busy
_RESULT = struct.Struct("=IBIQiQQIdBI")
_RESULT_HEAD = struct.Struct("=IQiQQIdBI")

_MAX_FRAME = 1 << 31


class Result(NamedTuple):
    """A worker's answer to a task.

    `nbytes` is the size of the batch in memory; `pickled` the bytes of pickle among or beside it; `busy` the seconds
    that the worker spent; `same` says that the template is that of the worker's previous result and was left out;
    `cursor` is the length of the pickled cursor behind the template, 0 for none.
    """

    epoch: int
    seq: int
    slot: int
    nbytes: int
    pickled: int
    samples: int
    busy: float
    same: bool
    cursor: int = 0


def pack(kind: int, payload: bytes = b"") -> bytes:
    """A frame whose body is all there is."""
    return _PREFIX.pack(1 + len(payload), kind) + payload


def pack_task(epoch: int, seq: int, slot: int, ring: int, index: bytes) -> bytes:
    """A task: write the batch of the pickled `index` to `slot` of ring number `ring`."""
    return _TASK.pack(21 + len(index), TASK, epoch, seq, slot, ring) + index


def unpack_task(body: bytes) -> tuple[int, int, int, int, bytes]:
    """Epoch, sequence number, slot, ring number, pickled index."""
    epoch, seq, slot, ring = _TASK_HEAD.unpack_from(body)
    return epoch, seq, slot, ring, body[20:]


def pack_ring(number: int, slots: int, slot_bytes: int) -> bytes:
    """A new ring; its descriptor goes with the frame."""
    return pack(RING, _RING_HEAD.pack(number, slots, slot_bytes))


def unpack_ring(body: bytes) -> tuple[int, int, int]:
    """Ring number, slots, bytes a slot."""
    number, slots, slot_bytes = _RING_HEAD.unpack(body)
    return number, slots, slot_bytes


def pack_reset(kind: int, epoch: int, payload: bytes = b"") -> bytes:
    """A new epoch begins (RESET), or the worker has dropped all that is older (RESET_DONE)."""
    return pack(kind, _RESET_HEAD.pack(epoch) + payload)


def unpack_reset(body: bytes) -> tuple[int, bytes]:
    """Epoch, payload."""
    return _RESET_HEAD.unpack_from(body)[0], body[_RESET_HEAD.size :]


def pack_answer(kind: int, epoch: int, seq: int, busy: float, payload: bytes = b"") -> bytes:
    """An answer without a batch: ERROR (the pickled error) or EXHAUSTED (the pickled cursor)."""
    return pack(kind, _ANSWER_HEAD.pack(epoch, seq, busy) + payload)


def unpack_answer(body: bytes) -> tuple[int, int, float, bytes]:
    """Epoch, sequence number, busy seconds, payload."""
    epoch, seq, busy = _ANSWER_HEAD.unpack_from(body)
    return epoch, seq, busy, body[_ANSWER_HEAD.size :]


def pack_result(result: Result, template: bytes, cursor: bytes = b"") -> bytes:
    """A batch's descriptor; `template` is ignored when the result says `same`."""
    body = cursor if result.same else template + cursor
    return _RESULT.pack(1 + _RESULT_HEAD.size + len(body), RESULT, *result) + body


def unpack_result(body: bytes) -> tuple[Result, bytes, bytes]:
    """The result, its template (empty when `same`) and its cursor."""
    epoch, seq, slot, nbytes, pickled, samples, busy, same, cursor = _RESULT_HEAD.unpack_from(body)
    result = Result(epoch, seq, slot, nbytes, pickled, samples, busy, bool(same), cursor)
    end = len(body) - cursor
    return result, body[_RESULT_HEAD.size : end], body[end:]


class FrameSplitter:
    """Cuts a byte stream into frames, however the stream was cut into reads.

    Raises (from `feed`):
        ValueError: a length that no frame of ours has: the stream is broken.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take what was read; give the kind and the body of each frame that is complete now."""
        if self._rest:
            data = self._rest + data
        frames: list[tuple[int, bytes]] = []
        start, size = 0, len(data)
        while size - start >= 5:
            length, kind = _PREFIX.unpack_from(data, start)
            if not 1 <= length <= _MAX_FRAME:
                raise ValueError(f"broken stream: a frame of {length} bytes")
            end = start + 4 + length
            if end > size:
                break
            frames.append((kind, data[start + 5 : end]))
            start = end
        self._rest = data[start:]
        return iter(frames)
