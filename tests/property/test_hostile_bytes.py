"""Frames, templates and slots that no worker of ours would send are refused with a reason; nothing is read out of
bounds.

Data path: worker -> [wire -> codec -> ring] -> consumer. All of it is Python over struct, pickle, numpy and torch, with
no C parser of our own, so hypothesis reaches as far as a coverage-guided fuzzer would. The pickle inside a template
comes from our own child and is trusted; the numbers in it are not.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.ring import Ring, oneoff_anchor
from asyncloader.workers.ipc.template import Template
from tests.property.hostile import NBYTES, WALLED, outcome, template_of, wild

# ------------------------------------------------------------------------------------------------- frames

UNPACKERS: dict[str, Callable[[bytes], tuple[Any, ...]]] = {
    "task": wire.unpack_task,
    "ring": wire.unpack_ring,
    "reset": wire.unpack_reset,
    "answer": wire.unpack_answer,
    "result": wire.unpack_result,
}
WHOLE: dict[str, bytes] = {
    "task": wire.pack_task(1, 2, 3, 4, 0.5, b"index"),
    "ring": wire.pack_ring(1, 8, 4096),
    "reset": wire.pack_reset(wire.RESET, 7, b"start"),
    "answer": wire.pack_answer(wire.ERROR, 1, 2, 0.5, b"error"),
    "result": wire.pack_result(wire.Result(1, 2, 3, 64, 5, 6, 0.5, False, 4), b"template", b"curs"),
}


def body_of(frame: bytes) -> bytes:
    ((_, body),) = wire.FrameSplitter().feed(frame)
    return body


@pytest.mark.parametrize("name", UNPACKERS)
@settings(deadline=None)
@given(body=st.binary(max_size=80))
@example(body=b"")
def test_any_body_is_read_or_refused(name: str, body: bytes) -> None:
    """An unpacker returns its fields or raises a `ValueError` with the body's length, and nothing else."""
    got = outcome(lambda: UNPACKERS[name](body))
    assert isinstance(got, tuple) or str(len(body)) in str(got)


@pytest.mark.parametrize("name", UNPACKERS)
def test_every_truncated_head_is_refused(name: str) -> None:
    """A body that ends anywhere within its head is refused; a whole body is read."""
    body = body_of(WHOLE[name])
    tails = {"task": 5, "ring": 0, "reset": 5, "answer": 5, "result": 12}
    for length in range(len(body) - tails[name]):
        with pytest.raises(ValueError, match="bytes"):
            UNPACKERS[name](body[:length])
    assert UNPACKERS[name](body)


@settings(deadline=None)
@given(cursor=st.integers(0, (1 << 32) - 1), template=st.binary(max_size=20), rest=st.binary(max_size=20))
@example(cursor=21, template=b"", rest=b"a" * 20)
@example(cursor=(1 << 32) - 1, template=b"template", rest=b"")
def test_a_cursors_size_that_lies_is_refused(cursor: int, template: bytes, rest: bytes) -> None:
    """A cursor longer than the body is refused; otherwise template and cursor are the body, cut once."""
    result = wire.Result(0, 0, 0, 0, 0, 1, 0.0, False, cursor)
    body = body_of(wire.pack_result(result, template, rest))
    if cursor > len(template) + len(rest):
        with pytest.raises(ValueError, match="cursor"):
            wire.unpack_result(body)
        return
    _, got_template, got_cursor = wire.unpack_result(body)
    assert got_template + got_cursor == template + rest
    assert len(got_cursor) == cursor


def _feed(splitter: wire.FrameSplitter, data: bytes) -> list[tuple[int, bytes]]:
    return list(splitter.feed(data))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8))
@example([b"\0\0\0\0\0"])
@example([b"\xff\xff\xff\xff\x0b", b"more"])
@example([b"\x01\0\0\0\x0b", b"\x01", b"\0\0\0"])
def test_any_stream_gives_frames_waits_or_is_broken(reads: list[bytes]) -> None:
    """A splitter returns the frames that the bytes contain, whatever the cuts; a length that no frame has breaks the
    stream, and the stream stays broken.
    """
    splitter = wire.FrameSplitter()
    frames: list[tuple[int, bytes]] = []
    for position, data in enumerate(reads):
        got = outcome(partial(_feed, splitter, data))
        if isinstance(got, ValueError):
            assert "broken stream" in str(got)
            with pytest.raises(ValueError, match="broken stream"):
                splitter.feed(b"")
            whole = b"".join(reads[: position + 1])
            break
        frames += got
    else:
        whole = b"".join(reads)
        assert splitter.pending + sum(5 + len(body) for _, body in frames) == len(whole)
    start = 0
    for kind, body in frames:
        assert whole[start : start + 5 + len(body)] == struct.pack("=IB", 1 + len(body), kind) + body
        start += 5 + len(body)


def test_a_long_frame_is_put_together_once() -> None:
    """A frame that arrives in very many reads is copied once or twice, not once per read."""
    read = bytes(1 << 12)
    splitter = wire.FrameSplitter()
    assert list(splitter.feed(struct.pack("=IB", 1 + 8192 * len(read), wire.ERROR))) == []
    for _ in range(8191):  # 32 MiB: if copied with every read, 128 GiB would pass through memory
        assert list(splitter.feed(read)) == []
    ((kind, body),) = splitter.feed(read)
    assert (kind, len(body), splitter.pending) == (wire.ERROR, 8192 * len(read), 0)


# ---------------------------------------------------------------------------------------------- templates


@settings(deadline=None)
@given(st.binary(max_size=40))
@example(b"")
@example(b"\xff\xff\xff\xff")
@example((1 << 31).to_bytes(4, "little") + pickle.dumps(((), -1, 0)))
@example((3).to_bytes(4, "little") + pickle.dumps(3)[:3])
def test_bytes_that_are_no_template_are_refused(data: bytes) -> None:
    """No crash and no error of pickle's own, but a `ValueError` that names the worker's answer."""
    # Pickle itself is trusted, and some of its opcodes import: bytes that may begin a pickle are not drawn here.
    if b"c" in data or b"\x93" in data or b"i" in data:
        return
    with pytest.raises(ValueError, match="a worker's answer is broken"):
        Template(data)


@settings(deadline=None)
@given(wild, wild)
@example(NBYTES - 1, 2)
@example(0, -1)
@example(0, NBYTES + 1)
@example(1 << 63, 1)
def test_structure_inside_of_the_slot_stays_inside(inside: int, size: int) -> None:
    """The pickled structure may lie among the leaves; if it would end beyond the anchor, it is not read."""
    template = outcome(lambda: Template(template_of((), inside, size, b"")))
    if isinstance(template, ValueError):
        assert "broken" in str(template)
        return
    if inside >= 0 and size and inside + size > NBYTES:
        with pytest.raises(ValueError, match=f"byte {inside + size} of {NBYTES}"):
            template.build(WALLED.anchor())
    else:  # no pickle stands there: the unpickler's error is right
        with pytest.raises((pickle.UnpicklingError, EOFError)):
            template.build(WALLED.anchor())


@pytest.mark.parametrize("table", [None, 3, (), ((),), ((), -1), ((), None, None), (((0,),), -1, 0), ("ab", -1, 0)])
def test_a_table_of_another_kind_is_refused(table: Any) -> None:
    """The table can be unpickled, but is no table."""
    head = pickle.dumps(table, protocol=5)
    with pytest.raises(ValueError, match="a worker's answer is broken"):
        Template(len(head).to_bytes(4, "little") + head)


# ---------------------------------------------------------------------------------------- slots and segments


@settings(deadline=None)
@given(slot=st.one_of(st.integers(-3, 12), wild), nbytes=wild)
@example(slot=8, nbytes=1)
@example(slot=-1, nbytes=1)
@example(slot=0, nbytes=8193)
@example(slot=7, nbytes=8192)
@example(slot=0, nbytes=1 << 63)
def test_a_ring_shows_its_own_slots_and_no_more_of_each(slot: int, nbytes: int) -> None:
    """A slot that the ring does not have, or more bytes than a slot has, is refused before memory is read."""
    ring = Ring(8, 8192, 2)
    try:
        if 0 <= slot < 8 and 0 <= nbytes <= 8192:
            assert ctypes.sizeof(ring.lend(slot, nbytes)) == nbytes
        else:
            for look in (ring.look, ring.lend):
                with pytest.raises(ValueError, match="bytes in slot"):
                    look(slot, nbytes)
            assert ring.leased == 0
    finally:
        ring.close_fd()


def test_a_slot_is_not_lent_twice() -> None:
    """A slot that the consumer holds cannot be lent again, and is released once."""
    ring = Ring(8, 4096, 2)
    slot = ring.take()
    assert slot is not None
    anchor = ring.lend(slot, 100)
    with pytest.raises(ValueError, match=f"slot {slot} of .* is the consumer's already"):
        ring.lend(slot, 100)
    del anchor
    assert ring.idle
    ring.close_fd()


@pytest.mark.parametrize("nbytes", [0, -1, 4097, 1 << 20, 1 << 40, 1 << 63, 1 << 64])
def test_a_segment_that_is_shorter_than_it_says_is_not_mapped(nbytes: int) -> None:
    """Touching bytes beyond a segment's end would raise SIGBUS."""
    fd = os.memfd_create("asyncloader-test") if hasattr(os, "memfd_create") else os.open("/dev/zero", os.O_RDWR)
    if hasattr(os, "memfd_create"):
        os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match=f"{nbytes} bytes in a segment of"):
        oneoff_anchor(fd, nbytes)
    os.close(fd)


def test_a_descriptor_that_is_no_segment_is_refused() -> None:
    """A pipe is an example."""
    ours, theirs = os.pipe()
    with pytest.raises(ValueError, match="segment of 0"):
        oneoff_anchor(ours, 64)
    os.close(ours)
    os.close(theirs)
