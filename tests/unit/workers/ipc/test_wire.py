from __future__ import annotations

import struct

import pytest

from asyncloader.workers.ipc import wire

RESULT = wire.Result(epoch=3, seq=1 << 40, slot=5, nbytes=1 << 35, pickled=77, samples=64, busy=0.125, same=False)


def only_frame(data: bytes) -> tuple[int, bytes]:
    splitter = wire.FrameSplitter()
    (frame,) = splitter.feed(data)
    assert splitter.pending == 0
    return frame


def test_ring_round_trip() -> None:
    """A ring's announcement carries the number, the slots, and the bytes per slot, also beyond 4 GB."""
    kind, body = only_frame(wire.pack_ring(1, 8, 1 << 40))
    assert (kind, wire.unpack_ring(body)) == (wire.RING, (1, 8, 1 << 40))


@pytest.mark.parametrize("kind", [wire.RESET, wire.RESET_DONE])
def test_reset_round_trip(kind: int) -> None:
    """A reset and its answer carry the epoch and a payload."""
    assert only_frame(wire.pack_reset(kind, 7))[0] == kind
    assert wire.unpack_reset(only_frame(wire.pack_reset(kind, 7, b"seed"))[1]) == (7, b"seed")


@pytest.mark.parametrize("cursors", [[], [b""], [b"where it stands", b"", b"there"]])
def test_started_round_trip(cursors: list[bytes]) -> None:
    """The start of an epoch carries an error, and a cursor for each copy of the dataset; a part of it is refused."""
    kind, body = only_frame(wire.pack_started(3, b"why", cursors))
    assert (kind, wire.unpack_started(body)) == (wire.STARTED, (3, b"why", cursors))
    whole = {11 + sum(4 + len(each) for each in cursors[:count]) for count in range(len(cursors) + 1)}
    for size in range(len(body)):
        if size not in whole:
            with pytest.raises(ValueError, match="broken stream"):
                wire.unpack_started(body[:size])


def test_started_of_too_many_copies() -> None:
    """A frame of empty cursors would be a list of millions."""
    assert len(wire.unpack_started(wire.pack_started(0, b"", [b""] * 1024)[5:])[2]) == 1024
    with pytest.raises(ValueError, match="broken stream"):
        wire.unpack_started(wire.pack_started(0, b"", [b""] * 1025)[5:])


@pytest.mark.parametrize("kind", [wire.ERROR, wire.EXHAUSTED])
def test_answer_round_trip(kind: int) -> None:
    """An answer without a batch carries epoch, number, busy seconds and a payload."""
    got, body = only_frame(wire.pack_answer(kind, 1, 2, 0.5, b"why"))
    assert (got, wire.unpack_answer(body)) == (kind, (1, 2, 0.5, b"why"))


def test_same_result_leaves_the_template_out() -> None:
    """A result that says "same" takes a few dozen bytes, whatever the template; its cursor is sent nevertheless."""
    frame = wire.pack_result(RESULT._replace(same=True), b"t" * 10_000)
    assert len(frame) < 80
    assert wire.unpack_result(only_frame(frame)[1]) == (RESULT._replace(same=True), b"", b"")
    frame = wire.pack_result(RESULT._replace(same=True, cursor=2), b"t" * 10_000, b"at")
    assert len(frame) < 80
    result, template, cursor = wire.unpack_result(only_frame(frame)[1])
    assert result.same is True
    assert (template, cursor) == (b"", b"at")


def test_a_result_without_a_template_may_have_a_cursor() -> None:
    """The cursor's length separates the two, also if one of them is empty."""
    body = only_frame(wire.pack_result(RESULT._replace(cursor=3), b"", b"abc"))[1]
    assert wire.unpack_result(body)[1:] == (b"", b"abc")
    body = only_frame(wire.pack_result(RESULT, b"abc"))[1]
    assert wire.unpack_result(body)[1:] == (b"abc", b"")


def test_stop_has_no_body() -> None:
    """A frame may be its kind alone."""
    assert only_frame(wire.pack(wire.STOP)) == (wire.STOP, b"")


def test_kinds_are_distinct() -> None:
    """No two messages share a kind, and the marks for slots are no slots."""
    kinds = [wire.TASK, wire.RING, wire.RESET, wire.STOP]
    kinds += [wire.RESULT, wire.ERROR, wire.EXHAUSTED, wire.RESET_DONE]
    assert len(set(kinds)) == 8
    assert wire.NO_SLOT != wire.ONEOFF
    assert max(wire.NO_SLOT, wire.ONEOFF) < 0


def test_incomplete_frame_is_pending() -> None:
    """Bytes of an unfinished frame wait for the rest."""
    frame = wire.pack(wire.STOP, b"body")
    splitter = wire.FrameSplitter()
    assert list(splitter.feed(frame[:6])) == []
    assert splitter.pending == 6
    assert list(splitter.feed(frame[6:])) == [(wire.STOP, b"body")]


@pytest.mark.parametrize("length", [0, (1 << 31) + 1, (1 << 32) - 1])
def test_impossible_length_is_a_broken_stream(length: int) -> None:
    """A length that no frame has is an error that names it, not a wait for 4 GB."""
    with pytest.raises(ValueError, match=f"broken stream: a frame of {length} bytes"):
        wire.FrameSplitter().feed(struct.pack("=IB", length, wire.RESULT))
