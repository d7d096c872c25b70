"""Helpers for the tests of hostile bytes: edge-case numbers, hand-made templates, and memory with guard regions."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from asyncloader.workers.ipc.ring import make_anchor

T = TypeVar("T")

NBYTES = 4096
EDGE = 64  # bytes on each side of the memory under test, which must never be seen
INSIDE, OUTSIDE = 0x11, 0xEE

wild = st.one_of(
    st.integers(-130, NBYTES + 130),
    st.sampled_from(
        [0, 1, -1, 16, NBYTES, NBYTES + 1, 1 << 31, 1 << 32, 1 << 61, 1 << 62, 1 << 63, -(1 << 63), 1 << 64, 1 << 200]
    ),
)


def outcome(call: Callable[[], T]) -> T | ValueError:
    """Return the call's result, or the `ValueError` by which it refuses; any other error is an error of the test."""
    try:
        return call()
    except ValueError as error:
        return error


def template_of(places: Any, inside: Any = -1, size: Any = 0, structure: bytes | None = None) -> bytes:
    """Return a template's bytes. It builds the list of its leaves."""
    head = pickle.dumps((places, inside, size), protocol=5)
    if structure is None:
        buffers = [pickle.PickleBuffer(bytearray()) for _ in range(len(places) if isinstance(places, tuple) else 0)]
        structure = pickle.dumps(buffers, protocol=5, buffer_callback=lambda _: None)
    return len(head).to_bytes(4, "little") + head + structure


class Walled:
    """Memory with walls on both sides: a byte of a wall that shows in a leaf was read outside."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, EDGE + NBYTES + EDGE)
        self.memory[:] = bytes([OUTSIDE]) * EDGE + bytes([INSIDE]) * NBYTES + bytes([OUTSIDE]) * EDGE

    def anchor(self, nbytes: int = NBYTES) -> Any:
        return make_anchor(self.memory, EDGE, nbytes)


WALLED = Walled()
