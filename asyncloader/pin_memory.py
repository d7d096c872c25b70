"""Page-locked copies, made ahead of the consumer.

Data path: reorder -> delivery -> [pin_memory, a stage] -> consumer.

A batch is opened in the stage's thread, copied into CUDA's page-locked memory by torch's own `pin_memory` (which knows
all container types and custom types with a `pin_memory()` method), and its slot is free again at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from asyncloader.delivery import Opener
from asyncloader.events import Action
from asyncloader.stage import Stage
from asyncloader.workers import wire
from asyncloader.workers.listener import Answer

__all__ = ["PinStage", "Pinned", "torch_pin", "use_current_device"]


class Pinned(NamedTuple):
    """A batch that was opened and pinned already, with the descriptor that it came with."""

    batch: Any
    result: wire.Result
    cursor: bytes
    bad: bytes


def torch_pin(device: str | None) -> Callable[[Any], Any]:
    """torch's pinning for this accelerator (None: the current one)."""
    return lambda batch: torch_pin_memory(batch, device)


class PinStage(Stage):
    """Pins what passes.

    Args:
        opener: opens the answers; used by this stage's thread alone.
        pin: gives the pinned copy of a batch.
        forward: as `Stage`'s.
    """

    def __init__(self, opener: Opener, pin: Callable[[Any], Any], forward: Callable[[Action], None]) -> None:
        super().__init__("asyncloader-pin", forward, initializer=use_current_device())
        self._opener = opener
        self._pin = pin

    def prepare(self, answer: Answer) -> Pinned:
        """Its pinned copy."""
        return Pinned(self._pin(self._opener.open(answer)), answer.result, answer.cursor, answer.bad)


def use_current_device() -> Callable[[], None]:
    """What makes the current device of this thread that of another one, which calls it; threads begin on device 0."""
    if not torch.accelerator.is_available():
        return lambda: None
    device = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(device)
