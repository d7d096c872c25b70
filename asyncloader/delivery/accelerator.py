"""What the loader asks of a device, and which class does it for which device.

Data path: delivery -> stage -> transfer -> [accelerator] -> consumer.

CUDA copies straight from page-locked rings, in a stream of its own. Other accelerators get plain copies, finished
before the batch is delivered; so do devices that torch will know in future. The CPU needs none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import torch

__all__ = ["Accelerator", "DoneEvent", "Lock", "PlainAccelerator"]


Lock: TypeAlias = Callable[[int, int], Callable[[], None]]
"""Page-locks mapped memory whose pages are there, given its address and its length in bytes; returns what undoes it,
which may be called in any thread. Raises PageLockError where it cannot be had; the device works on as before."""


class DoneEvent(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait, without the GIL, until the work up to this point is done."""
        ...


class Accelerator(ABC):
    """One device, for one loader. `work`, and what happens within it, are called by one thread at a time. Every call
    leaves the calling thread's current device what it was.
    """

    device: torch.device
    lock: Lock | None
    """Page-locks a ring, so that copies from it are as fast as from memory of the device's own allocator; None: there
    is no such thing."""
    node: int | None = None
    """The device's NUMA node, where there are several."""
    unlocked_because: str = ""
    """Why `lock` is None, where the device is one of those that could have it."""

    @abstractmethod
    def work(self) -> AbstractContextManager[None]:
        """In it, this thread's copies to the device go to the stream of copies."""

    @abstractmethod
    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> AbstractContextManager[None]:
        """Within `work`: in it, this thread's computations on `copies` go to another stream, which begins when
        `copied` has come. So the next batch is copied meanwhile.
        """

    def sync_side_streams(self) -> None:  # noqa: B027 - without side streams there is nothing that could
        """Both streams wait for what the current stream of this thread has been given so far."""

    @abstractmethod
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; itself if it is there. It may be read at any time until `event`."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory from which the device reads fast, made at once, and kept by whoever gave that memory until
        copies from it are done; or the tensor itself.
        """

    @abstractmethod
    def event(self) -> DoneEvent | None:
        """The end of what this thread's present stream was given so far; None: it is done already."""

    @abstractmethod
    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """In the consumer's thread: its current stream waits for the event; the tensors' memory is not used again
        before what that stream does with them is done.
        """


class PlainAccelerator(Accelerator):
    """A device without page-locked rings: copies are finished when they return."""

    lock = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def work(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> AbstractContextManager[None]:  # noqa: ARG002 - there is one stream
        """Nothing to prepare."""
        return nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain copy."""
        return tensor.to(self.device, non_blocking=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def event(self) -> DoneEvent | None:
        """Waits for the device: another thread will use what was copied."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return None

    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """Nothing to wait for."""
