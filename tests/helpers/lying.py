"""Workers that lie: the answers that they make up, the dataset that sends them, and the consumer's outcome.

The dataset finds, from within `__getitem__`, the control channel of its worker, and sends frames, as broken code in a
worker might. After that the worker sends nothing until it is asked to stop.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from tests.helpers.running import PATIENCE_S, run_async

WIDTH = 1000  # numbers in a sample


class Task(NamedTuple):
    """The lying worker's task, and the channel to which it lies."""

    channel: Channel
    epoch: int
    seq: int
    slot: int

    def answers(self, template: bytes = b"", fds: tuple[int, ...] = (), cursor: bytes = b"", **changes: Any) -> None:
        """Send a result with these fields; the others are those of an honest result."""
        length = changes.pop("cursor_bytes", len(cursor))
        honest = wire.Result(self.epoch, self.seq, self.slot, 8 * WIDTH, 50, 1, 0.0, False, length)
        frame = wire.pack_result(honest._replace(**changes), template, cursor)
        if fds:
            socket.send_fds(self.channel.sock, [frame], list(fds))
        else:
            self.sends(frame)

    def sends(self, data: bytes) -> None:
        self.channel.sock.sendall(data)


def _present_task() -> Task:
    frame: Any = sys._getframe()
    while not {"epoch", "seq", "slot"} <= set(frame.f_locals):  # from Python 3.13 on, its keys() is a list
        frame = frame.f_back
    found = frame.f_locals
    return Task(found["self"].channel, found["epoch"], found["seq"], found["slot"])


def template(*places: tuple[int, tuple[Any, ...]], inside: int = -1, size: int = 0) -> bytes:
    """Return the bytes of a template whose batch is its only leaf, or the list of its leaves."""
    head = pickle.dumps((places, inside, size), protocol=5)
    buffers = [pickle.PickleBuffer(bytearray()) for _ in places]
    batch = buffers if len(buffers) != 1 else buffers[0]
    return len(head).to_bytes(4, "little") + head + pickle.dumps(batch, 5, buffer_callback=lambda _: None)


def segment(nbytes: int) -> int:
    fd = os.memfd_create("asyncloader-lie")
    os.ftruncate(fd, nbytes)
    return fd


WHOLE = template((0, (0, WIDTH, 8, (1, WIDTH))))  # int64
LIES: dict[str, Callable[[Task], object]] = {
    "the template of before": lambda t: t.answers(same=True),
    "a slot that the ring has not": lambda t: t.answers(WHOLE, slot=1000),
    "another slot of the ring": lambda t: t.answers(WHOLE, slot=(t.slot + 1) % 8),
    "a slot below all": lambda t: t.answers(WHOLE, slot=-7),
    "more bytes than the slot has": lambda t: t.answers(WHOLE, nbytes=(64 << 10) + 1),
    "more bytes than there are": lambda t: t.answers(WHOLE, nbytes=(1 << 64) - 1),
    "a slot for another task": lambda t: t.answers(WHOLE, seq=t.seq + 1000),
    "a task that nobody asked for": lambda t: t.answers(template(), seq=t.seq + 1000, slot=wire.NO_SLOT, nbytes=0),
    "a segment for a task that nobody asked for": lambda t: t.answers(
        WHOLE, (segment(8 * WIDTH),), seq=t.seq + 1000, slot=wire.ONEOFF
    ),
    "a task of an epoch to come": lambda t: t.answers(WHOLE, epoch=t.epoch + 1),
    "the same answer twice": lambda t: [t.answers(WHOLE), t.answers(WHOLE)],
    "a segment that was not sent": lambda t: t.answers(WHOLE, slot=wire.ONEOFF),
    "a segment that is too short": lambda t: t.answers(
        template((0, (0, 1 << 20, 4, (1 << 20,)))), (segment(4096),), slot=wire.ONEOFF, nbytes=1 << 20
    ),
    "a segment that is no segment": lambda t: t.answers(WHOLE, os.pipe(), slot=wire.ONEOFF),
    "an empty segment": lambda t: t.answers(WHOLE, (segment(0),), slot=wire.ONEOFF, nbytes=0),
    "a leaf before the slot": lambda t: t.answers(template((0, (-64, 8, 8, (8,))))),
    "a leaf behind the batch": lambda t: t.answers(template((0, (8 * WIDTH, 8, 8, (8,))))),
    "a leaf far away": lambda t: t.answers(template((0, (1 << 40, 8, 8, (8,))))),
    "a strided leaf that reaches too far": lambda t: t.answers(template((1, (0, 64, 8, (2,), (1 << 40,), 0)))),
    "an empty leaf of any size": lambda t: t.answers(template((1, (-1, 0, 8, (1 << 50,), (1,), 0)))),
    "a structure behind the slot": lambda t: t.answers(template(inside=8 * WIDTH, size=1 << 30)),
    "leaves of a batch without bytes": lambda t: t.answers(WHOLE, slot=wire.NO_SLOT),
    "no template": lambda t: t.answers(b""),
    "a template that is none": lambda t: t.answers(b"\x04\0\0\0nope"),
    "a cursor of another length": lambda t: t.answers(WHOLE, cursor=b"1234", cursor_bytes=1 << 30),
    "a result that is cut off": lambda t: t.sends(wire.pack(wire.RESULT, bytes(20))),
    "an error that is cut off": lambda t: t.sends(wire.pack(wire.ERROR, bytes(3))),
    "an error that is none": lambda t: t.sends(wire.pack_answer(wire.ERROR, t.epoch, t.seq, 0.0, b"none")),
    "an error of no task": lambda t: t.sends(
        wire.pack_answer(wire.ERROR, t.epoch, t.seq + 1000, 0.0, pickle.dumps(ValueError("of no task")))
    ),
    "the end of a dataset that has no end": lambda t: t.sends(wire.pack_answer(wire.EXHAUSTED, t.epoch, t.seq, 0.0)),
    "a request for shards, where none are assigned": lambda t: t.sends(
        wire.pack_ask(t.epoch, 0, 0, pickle.dumps(None))
    ),
    "nothing, for a task that nobody asked for": lambda t: t.sends(
        wire.pack_answer(wire.ALL_DROPPED, t.epoch, t.seq + 1000, 0.0)
    ),
    "records of bad samples that are none": lambda t: t.sends(
        wire.pack_answer(wire.BAD_SAMPLES, t.epoch, t.seq, 0.0, b"none")
        + wire.pack_answer(wire.ALL_DROPPED, t.epoch, t.seq, 0.0)
    ),
    "records of bad samples that are cut off": lambda t: t.sends(wire.pack(wire.BAD_SAMPLES, b"none")),
    "a start-up that is cut off": lambda t: t.sends(wire.pack(wire.STARTED)),
    "the end of a stream, where none is served": lambda t: t.sends(
        wire.pack_answer(wire.STREAM_ENDED, t.epoch, t.seq, 0.0)
    ),
    "a start-up of an epoch to come": lambda t: t.sends(wire.pack_started(t.epoch + 5, b"", [])),
    "an epoch that was not begun": lambda t: t.sends(wire.pack_reset(wire.RESET_DONE, t.epoch + 5)),
    "a message to workers": lambda t: t.sends(wire.pack_task(t.epoch, t.seq, t.slot, 0, 0.0, b"")),
    "a message of no kind": lambda t: t.sends(wire.pack(99, b"what")),
    "an empty frame": lambda t: t.sends(struct.pack("=IB", 0, wire.RESULT)),
    "an endless frame": lambda t: t.sends(struct.pack("=IB", (1 << 32) - 1, wire.RESULT) + b"x" * 100),
}


def say_no_more(channel: Channel) -> NoReturn:
    """Wait until the main process asks this worker to stop, by shutting down its half of the channel; then end."""
    poll = select.poll()
    # macOS has no POLLRDHUP: its POLLHUP already reports one closed half.
    poll.register(channel.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(0)


class Liar(Dataset[Any]):
    """Sample `i` is full of `i`. The worker that is asked for sample `when` lies."""

    def __init__(self, how: str, when: int = 5) -> None:
        self.how = how
        self.when = when

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.when:
            task = _present_task()
            LIES[self.how](task)
            say_no_more(task.channel)
        return torch.full((WIDTH,), index)


def until_error(kind: str, dataset: Any, **options: Any) -> tuple[list[torch.Tensor], Exception]:
    """Return the batches, and the error after them; the loader is closed, and the error's frames are free."""
    options = {"timeout": PATIENCE_S, **options}
    got: list[torch.Tensor] = []

    def ended(error: Exception) -> tuple[list[torch.Tensor], Exception]:
        return got, error.with_traceback(None)

    async def run() -> tuple[list[torch.Tensor], Exception]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            try:
                async for batch in loader:
                    got.append(batch.clone())  # noqa: PERF401 - kept when an error comes
            except Exception as error:
                return ended(error)
        raise AssertionError(f"no error after {len(got)} batches")

    if kind != "sync":
        return run_async(run(), kind)
    with DataLoader[Any](dataset, **options) as loader:
        try:
            for batch in loader:
                got.append(batch.clone())  # noqa: PERF401
        except Exception as error:
            return ended(error)
    raise AssertionError(f"no error after {len(got)} batches")
