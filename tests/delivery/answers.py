"""Makes answers as the pool gives them to a stage: in a slot, in a segment of their own, or without bytes."""

from __future__ import annotations

from typing import Any

import torch

from asyncloader.base.events import Deliver
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.layout import PAGE
from asyncloader.workers.ipc.ring import Ring
from asyncloader.workers.ipc.template import Template


def new_ring(slots: int = 12, credits: int = 4, number: int = 0) -> Ring:
    """A ring of pages, its descriptor closed."""
    ring = Ring(slots=slots, slot_bytes=PAGE, credits=credits, number=number)
    ring.close_fd()
    return ring


def batch_of(seq: int) -> torch.Tensor:
    """Return the batch of task `seq`."""
    return torch.full((10,), seq)


def answer(seq: int, ring: Ring | None, value: Any = None, *, pickled: int = 0) -> Answer:
    """Return a worker's answer to task `seq`: `batch_of` it, or another value, with the number of bytes `pickled`."""
    encoded = Encoder().encode(batch_of(seq) if value is None else value)
    slot, fd = wire.NO_SLOT, None
    if encoded.nbytes and ring is not None:
        taken = ring.take()
        assert taken is not None
        slot = taken
        encoded.write(ring._memory, slot * ring.slot_bytes)
    elif encoded.nbytes:
        slot, fd = wire.ONEOFF, segment.create(encoded.nbytes)
        encoded.write(segment.map_segment(fd, encoded.nbytes), 0)
    result = wire.Result(0, seq, slot, encoded.nbytes, pickled, 10, 0.5, same=False)
    return Answer(result, Template(encoded.template), ring if slot >= 0 else None, fd)


def deliver(seq: int, ring: Ring | None, value: Any = None) -> Deliver:
    """Return the same answer in the form in which a stage receives it."""
    return Deliver(seq, 0, answer(seq, ring, value))


def overwrite_free_slots(ring: Ring) -> int:
    """Fill all free slots with other bytes, as workers may. Returns their number."""
    taken: list[int] = []
    while (slot := ring.take()) is not None:
        taken.append(slot)
        start = slot * ring.slot_bytes
        ring._memory[start : start + ring.slot_bytes] = b"\x5a" * ring.slot_bytes
    for slot in reversed(taken):
        ring.give_back(slot)
    return len(taken)
