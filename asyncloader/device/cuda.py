"""CUDA: copies in a side stream, from page-locked memory, ahead of the consumer.

Data path: delivery -> stage -> mover -> [cuda] -> consumer.

The consumer's stream waits for the copies on the device, not the consumer for them in its thread. `record_stream` tells
torch's allocator that the consumer's stream uses memory that belongs to the side stream; without it the memory of a
batch that is dropped would be given to the next copy while kernels still read it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch

from asyncloader.device.accelerator import Accelerator, DoneEvent
from asyncloader.device.driver import open_driver
from asyncloader.errors import DeviceUnavailable

__all__ = ["CudaAccelerator"]

Relaxed: TypeAlias = Callable[[], AbstractContextManager[None]]
"""As `Driver.relaxed`."""


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
        self._stream = torch.cuda.Stream(self.device)
        driver = open_driver(index)
        self.lock = None if driver is None else driver.lock
        self._relaxed: Relaxed = nullcontext if driver is None else driver.relaxed

    @contextmanager
    def work(self) -> Generator[None]:
        """Makes the side stream this thread's current one."""
        with self._relaxed(), torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        """A transform may use tensors that the consumer's stream still computes."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Asks for the copy; from memory that is not page-locked, waits for it."""
        return tensor.to(self.device, non_blocking=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of torch's page-locking allocator."""
        return tensor.pin_memory() if _can_be_pinned(tensor) else tensor

    def event(self) -> DoneEvent:
        """The side stream's, see `_Event`."""
        return _Event(self._stream, self._relaxed)

    def hand_over(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """See `Accelerator`. The consumer's stream is the current one of its thread."""
        stream = torch.cuda.current_stream(self.device)
        if event is not None:
            stream.wait_event(event.raw)  # type: ignore[attr-defined]
        for tensor in tensors:
            tensor.record_stream(stream)


class _Event:
    """The end of what a stream was given so far. Waiters sleep instead of spinning, and spoil no CUDA graph that the
    consumer captures meanwhile.
    """

    def __init__(self, stream: torch.cuda.Stream, relaxed: Relaxed) -> None:
        self.raw = torch.cuda.Event(blocking=True)
        self.raw.record(stream)
        self._relaxed = relaxed

    def synchronize(self) -> None:
        with self._relaxed():
            self.raw.synchronize()


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch can copy it to page-locked memory: as it is, so that no element may be in two places of it."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
