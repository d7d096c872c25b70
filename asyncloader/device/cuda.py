"""CUDA: copies in a side stream, from page-locked memory, ahead of the consumer.

Data path: delivery -> stage -> mover -> [cuda] -> consumer.

The consumer's stream waits for the copies on the device, not the consumer for them in its thread. `record_stream` tells
torch's allocator that the consumer's stream uses memory that belongs to a side stream; without it the memory of a
batch that is dropped would be given to the next copy while kernels still read it.

Every call is made with the loader's device as the thread's current one. A thread begins on device 0, and a call made
there, or the return from a stream of another device, opens a context on it: some 0.5 GB for each process of a machine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TypeAlias

import torch

from asyncloader.device.accelerator import Accelerator, DoneEvent
from asyncloader.device.driver import Driver, open_driver
from asyncloader.device.numa import node_of
from asyncloader.errors import DeviceUnavailable

__all__ = ["CudaAccelerator"]

_Here: TypeAlias = Callable[[], AbstractContextManager[None]]
"""In it, the loader's device is the thread's current one, and CUDA graphs that others capture are left alone."""


class CudaAccelerator(Accelerator):
    """One CUDA device.

    Args:
        device: of type "cuda"; without an index the current one of the calling thread.

    Raises:
        DeviceUnavailable: torch sees no such device.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable(str(device), f"torch {torch.__version__} sees no CUDA device, or was built without")
        index: int = torch.cuda.current_device() if device.type == str(device) else device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(str(device), f"torch sees {torch.cuda.device_count()} CUDA devices")
        self.device = torch.device("cuda", index)
        self._driver = open_driver(index)
        self._kept = _kept(os.getpid(), index)
        self.lock = None
        if self._driver is None:
            self.unlocked_because = "torch's CUDA here has no driver that locks rings"
        elif self._driver.refusal:
            self.unlocked_because = self._driver.refusal
        else:
            self.lock = self._driver.lock
        self.node = None if self._driver is None else node_of(self._driver.pci_address())

    @contextmanager
    def _here(self) -> Generator[None]:
        relaxed = nullcontext() if self._driver is None else self._driver.relaxed()
        with relaxed, torch.cuda.device(self.device):
            yield

    @contextmanager
    def work(self) -> Generator[None]:
        """Makes the stream of copies this thread's current one."""
        with self._here(), torch.cuda.stream(self._kept.copies):
            yield

    @contextmanager
    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> Generator[None]:
        """Makes the stream of computations this thread's current one."""
        stream = self._kept.computations
        _use(stream, copies, copied)
        with torch.cuda.stream(stream):
            yield

    def follow(self) -> None:
        """A transform may use tensors that the consumer's stream still computes."""
        with self._here():
            event = self.event()
            for stream in (self._kept.copies, self._kept.computations):
                stream.wait_event(event.raw)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Asks for the copy; from memory that is not page-locked, waits for it."""
        return tensor.to(self.device, non_blocking=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of torch's page-locking allocator."""
        return tensor.pin_memory() if _can_be_pinned(tensor) else tensor

    def event(self) -> _Event:
        """See `_Event`."""
        return _Event(torch.cuda.current_stream(self.device), self._kept.events, self._here)

    def hand_over(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """See `Accelerator`. The consumer's stream is the current one of its thread."""
        with self._here():
            _use(torch.cuda.current_stream(self.device), tensors, event)


class _Kept:
    """What a process keeps of a device, for all loaders and for good.

    torch's allocator keeps freed memory for the stream that it was allocated in: with streams of its own each loader
    would leave the memory of its last batches to nobody. And the streams are not of torch's pool, of which there are
    32 in all: one of those is another user's as well, who may be capturing a graph in it.
    """

    def __init__(self, device: torch.device, driver: Driver | None) -> None:
        self.copies = _new_stream(device, driver)
        self.computations = _new_stream(device, driver)
        self.events: deque[torch.cuda.Event] = deque()
        """That nobody waits for. To destroy an event could spoil a graph that somebody captures, so none is."""


@cache
def _kept(owner: int, index: int) -> _Kept:  # noqa: ARG001 - a part of the key
    """Those of this process: `owner` is its number. A forked child has none of its parent's."""
    return _Kept(torch.device("cuda", index), open_driver(index))


def _new_stream(device: torch.device, driver: Driver | None) -> torch.cuda.Stream:
    handle = None if driver is None else driver.new_stream()
    return torch.cuda.Stream(device) if handle is None else torch.cuda.ExternalStream(handle, device)


class _Event:
    """The end of what a stream was given so far. Waiters sleep instead of spinning, and spoil no CUDA graph that the
    consumer captures meanwhile. It is used again when nobody refers to it.
    """

    def __init__(self, stream: torch.cuda.Stream, unused: deque[torch.cuda.Event], here: _Here) -> None:
        try:
            self.raw = unused.pop()
        except IndexError:
            self.raw = torch.cuda.Event(blocking=True)
        self._unused = unused
        self._here = here
        self.raw.record(stream)

    def synchronize(self) -> None:
        with self._here():
            self.raw.synchronize()

    def __del__(self) -> None:
        # In any thread, also within the garbage collector: no lock, and nothing is asked of the device.
        if hasattr(self, "_unused"):
            self._unused.append(self.raw)


def _use(stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
    """The stream waits for the event; what it does with the tensors is done before their memory is used again."""
    if event is not None:
        stream.wait_event(event.raw)  # type: ignore[attr-defined]
    for tensor in tensors:
        tensor.record_stream(stream)


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch can copy it to page-locked memory: as it is, so that no element may be in two places of it."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
