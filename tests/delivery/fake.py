"""A device of our own, in the CPU's memory, whose copies happen later. The tests of `device=` use it instead of a card.

A copy reads its source only when the device's stream gets there, and keeps it no more than a device would: a locked
source is known by its address alone, a pinned one is kept by its allocator, any other is read at once. Until then the
destination is full of `STALE`. So a slot that is used again too early, and a batch that is looked at too early, show as
wrong content. The stream advances when a test calls `advance`, or, by default, when a thread waits for it, which is as
late as can be.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from asyncloader.delivery import OPENERS
from asyncloader.delivery.accelerator import Accelerator, DoneEvent
from asyncloader.delivery.tensors import dense_parts

PATIENCE_S = 60.0  # reached only by a hang
STALE = 0xA5  # every byte of a tensor whose copy has not come
_CPU = torch.device("cpu")


class LockedRange:
    """Memory that was page-locked."""

    def __init__(self, machine: FakeMachine, address: int, nbytes: int) -> None:
        self._machine = machine
        self._owner = os.getpid()
        self.address = address
        self.nbytes = nbytes
        self.undone = 0
        self.gone = threading.Event()
        self.undone_in: threading.Thread | None = None

    def undo(self) -> None:
        """Unlock the memory."""
        if os.getpid() != self._owner:
            return
        self.undone += 1
        self.undone_in = threading.current_thread()
        if self.undone > 1:
            self._machine.trouble.append(f"{self} was unlocked {self.undone} times")
        if not (_readable(self.address) and _readable(self.address + self.nbytes - 1)):
            self._machine.trouble.append(f"{self} was unmapped before it was unlocked")
        self.gone.set()

    def holds(self, tensor: torch.Tensor) -> bool:
        return not self.undone and self.address <= dense_parts(tensor)[-1].data_ptr() < self.address + self.nbytes

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes at {self.address:#x}>"


class Handed(NamedTuple):
    """A batch that the consumer took: addresses of its tensors, the event its stream waits for, and the thread."""

    addresses: list[int]
    event: DoneEvent | None
    thread: threading.Thread


class FakeMachine:
    """A machine with fake devices.

    Args:
        manual: streams go on by `FakeAccelerator.advance` alone.
        lockable: memory can be page-locked.
        refusal: what locking raises, if it does.
    """

    def __init__(self, *, manual: bool = False, lockable: bool = True, refusal: Exception | None = None) -> None:
        self.manual = manual
        self.lockable = lockable
        self.refusal = refusal
        self.locks: list[LockedRange] = []
        self.devices: list[FakeAccelerator] = []
        self.trouble: list[str] = []
        """Actions that a real device would not have tolerated."""

    def open(self, device: torch.device = _CPU) -> FakeAccelerator:
        """Return a new device."""
        self.devices.append(FakeAccelerator(self, device))
        return self.devices[-1]

    @property
    def device(self) -> FakeAccelerator:
        """The machine's only device."""
        (only,) = self.devices
        return only

    @property
    def locked(self) -> list[LockedRange]:
        """The ranges that are locked now."""
        return [each for each in self.locks if not each.undone]

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        if self.refusal is not None:
            raise self.refusal
        if not (_readable(address) and _readable(address + nbytes - 1)):
            self.trouble.append(f"{nbytes} bytes at {address:#x} are not mapped")
        for other in self.locked:
            if other.address < address + nbytes and address < other.address + other.nbytes:
                self.trouble.append(f"{nbytes} bytes at {address:#x} are locked already: {other}")
        self.locks.append(LockedRange(self, address, nbytes))
        return self.locks[-1].undo


class FakeEvent:
    """A point in the stream."""

    def __init__(self, device: FakeAccelerator) -> None:
        self._device = device
        self.done = threading.Event()

    def synchronize(self) -> None:
        self._device.wait_for(self)


class FakeAccelerator(Accelerator):
    """A fake device. `sources`: each tensor's memory before its copy, "ring" (locked), "pinned" or "pageable"."""

    def __init__(self, machine: FakeMachine, device: torch.device) -> None:
        self.device = device
        self.lock = machine.lock if machine.lockable else None
        self.unlocked_because = "" if machine.lockable else "it has no driver that locks rings"
        self.sources: list[str] = []
        self.handed: list[Handed] = []
        self.computed: list[tuple[list[int], DoneEvent | None]] = []
        """For each transform, the addresses of the copies that it reads, and the event that it waits for."""
        self.followed = 0  # epochs that were begun
        self.events = 0
        self.reached = 0
        self.waits: queue.SimpleQueue[FakeEvent] = queue.SimpleQueue()
        """Events that a thread has begun to wait for, where the stream is advanced by hand."""
        self._machine = machine
        self._manual = machine.manual
        self._stream: deque[Callable[[], object] | FakeEvent] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._working = threading.Lock()
        self._worker = 0
        self._pinned: dict[int, torch.Tensor] = {}

    # ----------------------------------------------------------------------------------- called by the loader

    @contextmanager
    def work(self) -> Generator[None]:
        if not self._working.acquire(blocking=False):
            self._machine.trouble.append("two threads are within work() at a time")
            self._working.acquire()
        self._worker = threading.get_ident()
        try:
            yield
        finally:
            self._worker = 0
            self._working.release()

    def sync_side_streams(self) -> None:
        self.followed += 1

    @contextmanager
    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> Generator[None]:
        self._expect_work("compute")
        self.computed.append(([tensor.data_ptr() for tensor in copies], copied))
        yield

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self._expect_work("copy")
        kind = self._source(tensor)
        if tensor.numel():
            self.sources.append(kind)
        if tensor.layout is not torch.strided or not tensor.numel():
            return tensor.clone()
        target = torch.empty_like(tensor)
        torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage()).fill_(STALE)
        if kind == "ring":
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            nbytes = (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()
            self._append(partial(self._arrive_from, target, tensor.data_ptr(), nbytes, tensor.stride()))
        else:
            self._append(partial(self._arrive, target, tensor if kind == "pinned" else tensor.clone()))
        return target

    def _arrive(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        self._pinned.pop(id(source), None)

    def _arrive_from(self, target: torch.Tensor, address: int, nbytes: int, stride: tuple[int, ...]) -> None:
        if not (_readable(address) and _readable(address + nbytes - 1)):
            self._machine.trouble.append(f"{nbytes} bytes at {address:#x} were unmapped before they were read")
            return
        source = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        target.copy_(source.view(target.dtype).as_strided(target.shape, stride))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        clone = tensor.clone()
        self._pinned[id(clone)] = clone
        return clone

    def _source(self, tensor: torch.Tensor) -> str:
        if id(tensor) in self._pinned:
            return "pinned"
        return "ring" if any(each.holds(tensor) for each in self._machine.locks) else "pageable"

    def event(self) -> FakeEvent:
        self._expect_work("event")
        event = FakeEvent(self)
        self.events += 1
        self._append(event)
        return event

    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        self.handed.append(Handed([tensor.data_ptr() for tensor in tensors], event, threading.current_thread()))
        if not self._manual and isinstance(event, FakeEvent):
            self.wait_for(event)

    def _expect_work(self, what: str) -> None:
        if self._worker != threading.get_ident():
            self._machine.trouble.append(f"{what} outside of work()")

    def _append(self, command: Callable[[], object] | FakeEvent) -> None:
        with self._changed:
            self._stream.append(command)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------- called by the test

    def advance(self) -> None:
        """Advance the stream to its next event, as soon as it has an event."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(isinstance(each, FakeEvent) for each in self._stream), PATIENCE_S)
            while not self._step():
                pass

    def go(self) -> None:
        """From now on the stream advances by itself."""
        with self._changed:
            self._manual = False
            while self._stream:
                self._step()

    def after_copies(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function as a `device_transform`: on a device it would be computed after the copies before it."""

        def ordered(batch: Any) -> Any:
            with self._changed:
                while self._stream:
                    self._step()
            return function(batch)

        return ordered

    def wait_for(self, event: FakeEvent) -> None:
        with self._changed:
            while not self._manual and not event.done.is_set():
                self._step()
        if not event.done.is_set():
            self.waits.put(event)
        assert event.done.wait(PATIENCE_S), "the stream was never advanced"

    def _step(self) -> bool:
        """Run the stream's next command. Returns whether it was an event."""
        command = self._stream.popleft()
        if not isinstance(command, FakeEvent):
            command()
            return False
        self.reached += 1
        command.done.set()
        return True


@contextmanager
def installed(kind: str = "cpu", **settings: Any) -> Generator[FakeMachine]:
    """Within this context, devices of this type are fake devices. At its end no rule may have been broken.

    Tensors "on" them are the CPU's: batches of objects that move themselves need the type "cpu".
    """
    machine = FakeMachine(**settings)
    usual = OPENERS.get(kind)
    OPENERS[kind] = machine.open
    try:
        yield machine
    finally:
        del OPENERS[kind]
        if usual is not None:
            OPENERS[kind] = usual
    assert machine.trouble == []


def _readable(address: int) -> bool:
    """Whether memory is mapped at this address: the kernel answers, where reading it would kill the process."""
    reader, writer = os.pipe()
    try:
        return bool(ctypes.CDLL(None).write(writer, ctypes.c_void_p(address), ctypes.c_size_t(1)) == 1)
    finally:
        os.close(reader)
        os.close(writer)
