"""Defines the interface of a device, `Accelerator`, and the plain implementation.

Data path: device_stage -> transfer -> [accelerator] -> consumer.

CUDA (`cuda.py`) copies straight from page-locked rings, in a stream of its own. Other accelerators, also those that
torch may add later, get plain copies that are finished before the batch is delivered. The CPU needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import torch

DeviceLike: TypeAlias = torch.device | str | int | None
"""A device as torch takes it: ``"cuda"``, ``"cuda:1"``, a `torch.device`, a number."""

Lock: TypeAlias = Callable[[int, int], Callable[[], None]]
"""Page-locks mapped memory whose pages exist, given its address and length in bytes. Returns a function that unlocks
it, from any thread. Raises PageLockError if that is refused; the device keeps working."""


class DoneEvent(Protocol):
    """A point in a device stream."""

    def synchronize(self) -> None:
        """Wait, without the GIL, until all work up to this point is done."""
        ...


class Accelerator(ABC):
    """One device, for one loader. `work`, and everything inside it, is called by one thread at a time. No call changes
    the calling thread's current device.
    """

    device: torch.device
    lock: Lock | None
    """Page-locks a ring, so that copies from it are as fast as from torch's pinned memory; None if the device has no
    page-locking."""
    unlocked_because: str = ""
    """Why `lock` is None, for devices that could have it."""

    @abstractmethod
    def work(self) -> AbstractContextManager[None]:
        """Context in which this thread's copies to the device go to the copy stream."""

    @abstractmethod
    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> AbstractContextManager[None]:
        """Context, inside `work`, in which this thread's computations on `copies` go to another stream. That waits for
        `copied`, so that the next batch can be copied at the same time.
        """

    def sync_side_streams(self) -> None:  # noqa: B027 - no-op without side streams
        """Make both side streams wait for all work that this thread's current stream has so far."""

    @abstractmethod
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; itself if it is there already. The source may be read until `event`."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory, made synchronously; its allocator keeps that memory until copies from it are
        done. Or the tensor itself.
        """

    @abstractmethod
    def event(self) -> DoneEvent | None:
        """An event after all work that this thread's current stream has so far; None if that is done already."""

    @abstractmethod
    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """Make the current stream of the consumer's thread wait for the event. The tensors' memory is not reused before
        that stream's work with them is done.
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
        """Waits for the device, because another thread will use the copies."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return None

    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """Nothing to wait for."""
