"""Encode, write, and read again, as the worker and the consumer do, with real shared memory in between."""

from __future__ import annotations

import mmap
from typing import Any

from asyncloader.workers.ipc.codec import Encoded, Encoder
from asyncloader.workers.ipc.ring import make_anchor
from asyncloader.workers.ipc.template import Template

OFFSET = 4096
"""Batches are written in the middle of the memory, as in a ring."""


def write(encoded: Encoded) -> mmap.mmap:
    """The encoded batch in memory that was full of other bytes before."""
    memory = mmap.mmap(-1, OFFSET + encoded.nbytes + 4096)
    memory[:] = b"\xa5" * len(memory)
    encoded.write(memory, OFFSET)
    assert memory[:OFFSET] == b"\xa5" * OFFSET, "written before the slot"
    assert memory[OFFSET + encoded.nbytes :] == b"\xa5" * 4096, "written beyond the slot"
    return memory


def view(encoded: Encoded) -> Any:
    """The batch as views of the slot."""
    memory = write(encoded)
    return Template(encoded.template).build(make_anchor(memory, OFFSET, encoded.nbytes) if encoded.nbytes else None)


def copied(encoded: Encoded) -> Any:
    """The batch copied out of the slot, which is overwritten afterwards."""
    memory = write(encoded)
    if not encoded.nbytes:
        return Template(encoded.template).build(None)
    batch = Template(encoded.template).copy_out(make_anchor(memory, OFFSET, encoded.nbytes))
    memory[:] = b"\x5a" * len(memory)
    return batch


def round_trip(value: Any) -> Any:
    """`value` through the slot, as views."""
    return view(Encoder().encode(value))
