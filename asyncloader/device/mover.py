"""What becomes of a batch between its slot and the consumer's stream.

Data path: delivery -> stage -> [mover] -> consumer.

`move` is called ahead of the consumer, by one thread: copies, then the user's `device_transform`, in the side stream.
`take` is called by the consumer's thread, and waits for nothing but on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from asyncloader.device.accelerator import Accelerator, DoneEvent
from asyncloader.device.static import StaticTensors
from asyncloader.device.tensors import dense_parts, move, tensors_of

__all__ = ["Mover", "Ready"]


class Ready(NamedTuple):
    """A batch whose copies have been asked for.

    Attributes:
        batch: the batch on the device.
        tensors: those of its tensors that are there.
        event: when they hold their values; None: now.
    """

    batch: Any
    tensors: list[torch.Tensor]
    event: DoneEvent | None


class Mover:
    """Moves batches to one device.

    Args:
        accelerator: the device.
        transform: the user's, from a batch on the device to the one that is delivered; None: it is delivered as it is.
        static: deliver every batch in the same tensors.
    """

    def __init__(self, accelerator: Accelerator, transform: Callable[[Any], Any] | None, *, static: bool) -> None:
        self.accelerator = accelerator
        self._transform = transform
        self._static = StaticTensors() if static else None
        self._turn = threading.Lock()

    def move(self, batch: Any, *, locked: bool) -> Ready:
        """Begin to copy a batch. Its memory must stay as it is until the event.

        Args:
            batch: in the CPU's memory.
            locked: that is page-locked; other memory is copied to such first.

        Raises:
            Exception: the transform's, or the device's; the memory is not read any more then.
        """
        accelerator = self.accelerator
        # Two iterators of a loader have a stage each; and a batch that takes the place of a lost one is moved by the
        # consumer's own thread.
        with self._turn, accelerator.work():
            try:
                moved = move(batch, accelerator.device, accelerator.copy if locked else self._copy_pinned)
                if self._transform is not None:
                    moved = self._transform(moved)
                tensors = [tensor for tensor in tensors_of(moved) if self._is_there(tensor)]
                return Ready(moved, tensors, accelerator.event())
            except BaseException:
                self._wait_for_what_was_begun()
                raise

    def _copy_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.copy(self.accelerator.pin(tensor))

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.accelerator.device.type

    def _wait_for_what_was_begun(self) -> None:
        with suppress(Exception):  # the device may be what failed
            event = self.accelerator.event()
            if event is not None:
                event.synchronize()

    def take(self, ready: Ready) -> Any:
        """The batch, for the current stream of this thread."""
        parts = [part for tensor in ready.tensors for part in dense_parts(tensor) if self._is_there(part)]
        self.accelerator.hand_over(parts, ready.event)
        return ready.batch if self._static is None else self._static.fill(ready.batch, ready.tensors)
