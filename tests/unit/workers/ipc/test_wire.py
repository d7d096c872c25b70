from __future__ import annotations

import struct

import pytest

from asyncloader.workers.ipc import wire


def only_frame(data: bytes) -> tuple[int, bytes]:
    splitter = wire.FrameSplitter()
    (frame,) = splitter.feed(data)
    assert splitter.pending == 0
    return frame


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


def test_stop_has_no_body() -> None:
    """A frame may be its kind alone."""
    assert only_frame(wire.pack(wire.STOP)) == (wire.STOP, b"")


@pytest.mark.parametrize("length", [0, (1 << 31) + 1, (1 << 32) - 1])
def test_impossible_length_is_a_broken_stream(length: int) -> None:
    """A length that no frame has is an error that names it, not a wait for 4 GB."""
    with pytest.raises(ValueError, match=f"broken stream: a frame of {length} bytes"):
        wire.FrameSplitter().feed(struct.pack("=IB", length, wire.RESULT))
