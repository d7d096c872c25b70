"""Packs and unpacks the frames between the main process and a worker. Pure: no sockets.

Data path: scheduler -> [wire] -> worker -> [wire] -> reorder. Batches travel through shared memory; over the socket
goes a descriptor of a few dozen bytes.

A frame is ``length (u32, of what follows) | kind (u8) | head (fixed, by kind) | body (the rest)``. One read may return
several frames, and one frame may take several reads. Both ends have one version and one byte order: native byte order,
no version field. A service, whose nodes pass bodies on between machines, compares versions when it connects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# main -> worker
TASK, RING, RESET, STOP = 1, 2, 3, 4
ASSIGNMENT = 6
"""The shards that the worker reads next, of a dataset whose shards the main process assigns."""
# worker -> main
RESULT, ERROR, EXHAUSTED, RESET_DONE, READY = 11, 12, 13, 14, 15
STARTED = 16
"""The user's start-up code is over: from here on a time-out or a death is due to a task."""
ALL_DROPPED = 17
"""A task was carried out, but gave no batch: all of its samples were dropped. With the pickled cursor."""
BAD_SAMPLES = 18
"""Pickled records of a task's samples that were dropped or replaced; the task's answer follows."""
LEAVING = 19
"""The worker exceeds its memory limit and ends now; its replacement gets its unanswered tasks. In torch mode with its
pickled RNG state."""
ASK = 20
"""The worker requests its next assignment of shards."""
SPANS = 23
"""The spans of a task that asked for them (`unpack_task`); the task's answer follows. See `tracing/spans.py`."""
MOST_SPAN_BYTES = 1 << 16
"""Bytes of a frame of spans, at most."""
STREAM_ENDED = 24
"""One of the streams that the worker serves ended at this task. Unlike after EXHAUSTED, the worker answers all other
tasks, those of this stream by the same. With the pickled cursor."""
COUNTS = 22
"""The figures of a worker that shares no memory with the main process: `Recorder.packed`."""
LOG = 21
"""A line for the main process's log: pickled level, text, the store that it is about, and whether that is silent."""

NO_SLOT = -1
"""In a task: no slot was free. In a result: the batch has no bytes in shared memory."""
ONEOFF = -2
"""In a result: the batch is in a segment of its own, whose descriptor came with the frame."""

_PREFIX = struct.Struct("=IB")
PREFIX_BYTES = _PREFIX.size
"""Of a frame, before its body."""
# Tasks and results are packed together with their prefix, in one call: each batch has one of both.
_TASK = struct.Struct("=IBIQiId")  # prefix, epoch, seq, slot, ring, sent
_TASK_HEAD = struct.Struct("=IQiId")
_RING_HEAD = struct.Struct("=IIQ")  # number, slots, slot_bytes
_RESET_HEAD = struct.Struct("=I")  # epoch
_STARTED_HEAD = struct.Struct("=II")  # epoch, bytes of the error
_SIZE = struct.Struct("=I")
_ANSWER_HEAD = struct.Struct("=IQd")  # epoch, seq, busy
_ASK_HEAD = struct.Struct("=IQQ")  # epoch, number, batch
_ASSIGNMENT_HEAD = struct.Struct("=IQ")  # epoch, number
_RESULT = struct.Struct("=IBIQiQQId?Id")
_RESULT_HEAD = struct.Struct("=IQiQQId?Id")
_SLOT, _SLOT_AT = struct.Struct("=i"), struct.calcsize("=IQ")  # within that head, as `sent` below
_SENT, _SENT_AT = struct.Struct("=d"), struct.calcsize("=IQiQQId?I")

MOST_FRAME = 1 << 31
"""Bytes of a frame, at most, unless a splitter says otherwise."""
_LONGEST_S = 1e12
_MOST_COPIES = 1 << 10  # of a dataset, in one worker


class Result(NamedTuple):
    """A worker's answer to a task.

    `nbytes` is the size of the batch in memory; `pickled` the size of its pickle, in memory or in the frame; `busy` the
    seconds that the worker spent; `same` means that the template equals that of the worker's previous result and is
    omitted; `cursor` is the length of the pickled cursor after the template, 0 for none; `sent` is the time by
    `perf_counter`, which is the same clock in all processes of a machine.
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
    sent: float = 0.0


def pack(kind: int, payload: bytes = b"") -> bytes:
    """Pack a frame without a head."""
    return _PREFIX.pack(1 + len(payload), kind) + payload


def pack_task(epoch: int, seq: int, slot: int, ring: int, sent: float, index: bytes) -> bytes:
    """Pack a task: write the batch of the pickled `index` to `slot` of ring number `ring`. `sent` is the time now;
    negative: the worker is to send the task's spans, for a trace.
    """
    return _TASK.pack(1 + _TASK_HEAD.size + len(index), TASK, epoch, seq, slot, ring, sent) + index


def unpack_task(frame: bytes, start: int = 0) -> tuple[int, int, int, int, float, bytes]:
    """Return epoch, sequence number, slot, ring number, time of sending, pickled index. `start` is the place of the
    body: 0, or `PREFIX_BYTES` in a whole frame.
    """
    end = start + _TASK_HEAD.size
    if len(frame) < end:
        raise _cut_off(_TASK_HEAD, frame)
    epoch, seq, slot, ring, sent = _TASK_HEAD.unpack_from(frame, start)
    return epoch, seq, slot, ring, sent, frame[end:]


def pack_ring(number: int, slots: int, slot_bytes: int) -> bytes:
    """Pack a new ring; its descriptor is sent with the frame."""
    return pack(RING, _RING_HEAD.pack(number, slots, slot_bytes))


def unpack_ring(body: bytes) -> tuple[int, int, int]:
    """Return ring number, slots, bytes per slot."""
    number, slots, slot_bytes = _unpack(_RING_HEAD, body)
    return number, slots, slot_bytes


def pack_reset(kind: int, epoch: int, payload: bytes = b"") -> bytes:
    """Pack RESET (a new epoch begins) or RESET_DONE (the worker has dropped all older tasks)."""
    return pack(kind, _RESET_HEAD.pack(epoch) + payload)


def unpack_reset(body: bytes) -> tuple[int, bytes]:
    """Return epoch, payload."""
    return _unpack(_RESET_HEAD, body)[0], body[_RESET_HEAD.size :]


def pack_started(epoch: int, error: bytes, cursors: Sequence[bytes]) -> bytes:
    """Pack STARTED (the worker has begun the epoch): the packed start-up error, if any, and the packed cursors of its
    copies of the dataset. An empty cursor: that copy has none.
    """
    parts = [part for cursor in cursors for part in (_SIZE.pack(len(cursor)), cursor)]
    return pack(STARTED, b"".join((_STARTED_HEAD.pack(epoch, len(error)), error, *parts)))


def unpack_started(body: bytes) -> tuple[int, bytes, list[bytes]]:
    """Return epoch, error, cursors."""
    epoch, size = _unpack(_STARTED_HEAD, body)
    at = _STARTED_HEAD.size + size
    error, cursors = body[_STARTED_HEAD.size : at], list[bytes]()
    while at < len(body) and len(cursors) < _MOST_COPIES:
        (size,) = _unpack(_SIZE, body[at : at + _SIZE.size])
        at += _SIZE.size + size
        cursors.append(body[at - size : at])
    if at != len(body):
        raise ValueError("broken stream: a frame is cut off")
    return epoch, error, cursors


def pack_answer(kind: int, epoch: int, seq: int, busy: float, payload: bytes = b"") -> bytes:
    """Pack an answer without a batch: ERROR (the pickled error), EXHAUSTED and STREAM_ENDED (the pickled cursor),
    ALL_DROPPED (ditto); or BAD_SAMPLES (the pickled records), which precedes an answer.
    """
    return pack(kind, _ANSWER_HEAD.pack(epoch, seq, busy) + payload)


def unpack_answer(body: bytes) -> tuple[int, int, float, bytes]:
    """Return epoch, sequence number, busy seconds, payload."""
    epoch, seq, busy = _unpack(_ANSWER_HEAD, body)
    if not 0.0 <= busy < _LONGEST_S:
        raise ValueError(f"broken stream: an answer of {len(body)} bytes that took {busy} seconds")
    return epoch, seq, busy, body[_ANSWER_HEAD.size :]


def pack_ask(epoch: int, number: int, batch: int, left: bytes) -> bytes:
    """A request for assignment `number`, made during batch `batch`; `left` (pickled): see `ShardAssigner.ask`."""
    return pack(ASK, _ASK_HEAD.pack(epoch, number, batch) + left)


def unpack_ask(body: bytes) -> tuple[int, int, int, bytes]:
    """Return epoch, number, batch, pickled rest."""
    epoch, number, batch = _unpack(_ASK_HEAD, body)
    return epoch, number, batch, body[_ASK_HEAD.size :]


def pack_assignment(epoch: int, number: int, answer: bytes) -> bytes:
    """The (pickled) answer to the request for assignment `number`."""
    return pack(ASSIGNMENT, _ASSIGNMENT_HEAD.pack(epoch, number) + answer)


def unpack_assignment(body: bytes) -> tuple[int, int, bytes]:
    """Return epoch, number, pickled answer."""
    epoch, number = _unpack(_ASSIGNMENT_HEAD, body)
    return epoch, number, body[_ASSIGNMENT_HEAD.size :]


def pack_result(result: Result, template: bytes, cursor: bytes = b"") -> bytes:
    """Pack a batch's descriptor; `template` is ignored if the result says `same`."""
    body = cursor if result.same else template + cursor
    return _RESULT.pack(1 + _RESULT_HEAD.size + len(body), RESULT, *result) + body


def unpack_result(body: bytes) -> tuple[Result, bytes, bytes]:
    """Return the result, its template (empty if `same`) and its cursor."""
    if len(body) < _RESULT_HEAD.size:
        raise _cut_off(_RESULT_HEAD, body)
    result = Result._make(_RESULT_HEAD.unpack_from(body))
    if not (0.0 <= result.busy < _LONGEST_S and 0.0 <= result.sent < _LONGEST_S):  # NaN is neither
        raise ValueError(
            f"broken stream: a result of {len(body)} bytes that took {result.busy} seconds, sent at {result.sent}"
        )
    end = len(body) - result.cursor
    if end < _RESULT_HEAD.size:
        raise ValueError(f"broken stream: a result of {len(body)} bytes with a cursor of {result.cursor}")
    return result, body[_RESULT_HEAD.size : end], body[end:]


def place_result(body: bytes, slot: int, sent: float) -> bytes:
    """Return a result's body, as `unpack_result` reads it, with another slot and time of sending."""
    made = bytearray(body)
    _SLOT.pack_into(made, _SLOT_AT, slot)
    _SENT.pack_into(made, _SENT_AT, sent)
    return bytes(made)


def _unpack(head: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) < head.size:
        raise _cut_off(head, body)
    return head.unpack_from(body)


def _cut_off(head: struct.Struct, body: bytes) -> ValueError:
    return ValueError(f"broken stream: a frame with {len(body)} bytes of a head of {head.size}")


class FrameSplitter:
    """Cuts a byte stream into frames, however the stream was cut into reads.

    A frame that takes many reads (a worker's cursor may be large) is joined once.

    Args:
        most: bytes of a frame, at most.

    Raises (from `feed`):
        ValueError: an impossible length. The stream is broken, and stays so.
    """

    __slots__ = ("_most", "_rest", "_wanted")

    def __init__(self, most: int = MOST_FRAME) -> None:
        self._most = most
        self._rest = bytearray()
        self._wanted = 5  # bytes needed for the next step

    @property
    def pending(self) -> int:
        """Number of bytes of an incomplete frame."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add the bytes of one read; return kind and body of each frame that is complete now."""
        if not self._rest and len(data) >= 5:
            length, kind = _PREFIX.unpack_from(data)
            if len(data) == 4 + length and 1 <= length <= self._most:
                return iter(((kind, data[5:]),))  # the usual case: a single frame, and all of it
        if self._rest:
            self._rest += data
            # Cut only when a whole step has come: each cut copies the rest, and a large frame takes many reads.
            if len(self._rest) < self._wanted:
                return iter(())
            data = bytes(self._rest)
        frames: list[tuple[int, bytes]] = []
        start, size, self._wanted = 0, len(data), 5
        while size - start >= 5:
            length, kind = _PREFIX.unpack_from(data, start)
            # Before any of its bytes is kept: a wrong length would have all that follows collected for one frame.
            if not 1 <= length <= self._most:
                # The wrong head stays: behind it no frame can be found, so each later call must raise, too.
                self._rest, self._wanted = bytearray(data[start : start + 5]), 5
                raise ValueError(f"broken stream: a frame of {length} bytes")
            end = start + 4 + length
            if end > size:
                self._wanted = 4 + length
                break
            frames.append((kind, data[start + 5 : end]))
            start = end
        self._rest = bytearray(data[start:])
        return iter(frames)
