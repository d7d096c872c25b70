"""The forms `prefetch` and `pin_memory`: a thread reads a graph ahead, and for `pin_memory` also page-locks the items.

Data path: graph -> [prefetch: thread, buffer] -> graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils.pin_memory import pin_memory

from asyncloader.dataloader2.datapipes.forms import state_with
from asyncloader.dataloader2.datapipes.read_ahead import ReadAhead


class Pausable(IterDataPipe[Any]):
    """A datapipe with a thread that reads ahead, and can pause. Each epoch has a thread of its own, which no pickle
    has.
    """

    _ahead: ReadAhead | None = None

    def __getstate__(self) -> Any:
        return state_with(self, _ahead=None)

    def pause(self) -> None:
        """Stop reading ahead until `resume`."""
        if self._ahead is not None:
            self._ahead.pause()

    def resume(self) -> None:
        """Go on reading ahead."""
        if self._ahead is not None:
            self._ahead.resume()


class Prefetcher(Pausable):
    """Form ``prefetch``. Reads ahead in a thread, which starts when the first item is asked for.

    Args:
        source_datapipe: is read in that thread.
        buffer_size: items that are kept ready, from 1; default 10.

    Raises:
        ValueError: the buffer size is less than 1.
    """

    def __init__(self, source_datapipe: IterDataPipe[Any], buffer_size: int = 10) -> None:
        if buffer_size <= 0:
            raise ValueError("'buffer_size' is required to be a positive integer.")
        self.source_datapipe: Any = source_datapipe
        self.buffer_size = buffer_size

    def __iter__(self) -> Iterator[Any]:
        ahead = self._ahead = ReadAhead(self._begin(), self.buffer_size)
        try:
            yield from ahead
        finally:
            ahead.stop()

    def _begin(self) -> Callable[[], Iterator[Any]]:
        """Return the function that makes the thread's iterator. It must not refer to this object: see `ReadAhead`."""
        return partial(iter, self.source_datapipe)

    def __len__(self) -> int:
        return len(self.source_datapipe)

    def reset(self) -> None:
        """End the thread of the epoch before."""
        self.shutdown()

    def shutdown(self) -> None:
        """End the thread, and wait for it, at most 20 seconds. Idempotent."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()


class PinMemory(Prefetcher):
    """Form ``pin_memory``. Copies each item to page-locked memory, in a thread, one item ahead.

    It is not replicable: the main process runs it.

    Args:
        source_datapipe: is read in that thread.
        device: the CUDA device that the memory is locked for; default: the current device.
        pin_memory_fn: from an item and a device to the page-locked item; default: torch's, for any structure.

    Raises:
        RuntimeError: CUDA is not available.
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        device: Any = None,
        pin_memory_fn: Callable[[Any, Any], Any] = pin_memory,
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("``pin_memory`` can only be used when CUDA is available.")
        super().__init__(source_datapipe, buffer_size=1)
        self.device = torch.cuda.current_device() if device is None else device
        self.pin_memory_fn = pin_memory_fn

    def _begin(self) -> Callable[[], Iterator[Any]]:
        return partial(_pin, self.source_datapipe, self.pin_memory_fn, self.device)

    def is_replicable(self) -> bool:
        """Return False: page-locked memory belongs to one process."""
        return False


def _pin(source: IterDataPipe[Any], pin: Callable[[Any, Any], Any], device: Any) -> Iterator[Any]:
    for item in source:
        yield pin(item, device)
