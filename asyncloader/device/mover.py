"""What becomes of a batch between its slot and the consumer's stream.

Data path: delivery -> stage -> [mover] -> consumer.

`move` is called ahead of the consumer, by one thread: copies, then the user's `device_transform`, in the side stream.
`take` is called by the consumer's thread, and waits for nothing but on the device.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def move(self, batch: Any, *, locked: bool) -> Ready:
        """Begin to copy a batch. Its memory must stay as it is until the event.

        Args:
            batch: in the CPU's memory.
            locked: that is page-locked; other memory is copied to such first.
        """
        accelerator = self.accelerator
        with accelerator.work():
            moved = move(batch if locked else accelerator.pin(batch), accelerator.device)
            if self._transform is not None:
                moved = self._transform(moved)
            event = accelerator.event()
        device = accelerator.device.type
        return Ready(moved, [tensor for tensor in tensors_of(moved) if tensor.device.type == device], event)

    def take(self, ready: Ready) -> Any:
        """The batch, for the current stream of this thread."""
        parts = [part for tensor in ready.tensors for part in dense_parts(tensor)]
        self.accelerator.hand_over(parts, ready.event)
        if self._static is None:
            return ready.batch
        return self._static.fill(ready.batch, [each for each in ready.tensors if each.layout is torch.strided])
