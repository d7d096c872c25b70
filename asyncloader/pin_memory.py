"""Page-locked copies, made ahead of the consumer in a thread of their own.

Data path: reorder -> delivery -> [pin_memory] -> consumer.

One thread, so that order is kept: every item that goes to the consumer passes through it, whether there is something to
pin or not. A batch is opened there, copied into CUDA's page-locked memory by torch's own `pin_memory` (which knows all
container types and custom types with a `pin_memory()` method), and its slot is free again at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from asyncloader.delivery import Opener
from asyncloader.events import Action, Deliver, Fail
from asyncloader.workers import wire
from asyncloader.workers.listener import Answer

__all__ = ["PinStage", "Pinned", "torch_pin"]


class Pinned(NamedTuple):
    """A batch that was opened and pinned already, with the descriptor that it came with."""

    batch: Any
    result: wire.Result
    cursor: bytes
    bad: bytes


def torch_pin(device: str | None) -> Callable[[Any], Any]:
    """torch's pinning for this accelerator (None: the current one)."""
    return lambda batch: torch_pin_memory(batch, device)


class PinStage:
    """Pins what passes, in order.

    Args:
        opener: opens the answers; used by this stage's thread alone.
        pin: gives the pinned copy of a batch.
        forward: called in the stage's thread with each item, in order.
    """

    def __init__(self, opener: Opener, pin: Callable[[Any], Any], forward: Callable[[Action], None]) -> None:
        self._opener = opener
        self._pin = pin
        self._forward = forward
        self._items: deque[Action] = deque()
        self._executor = ThreadPoolExecutor(1, "asyncloader-pin", initializer=_use_current_device())

    def put(self, item: Action) -> None:
        """Take an item; returns at once."""
        self._items.append(item)
        self._executor.submit(self._run)

    def _run(self) -> None:
        item = self._items.popleft()
        try:
            if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
                answer = item.outcome
                pinned = Pinned(self._pin(self._opener.open(answer)), answer.result, answer.cursor, answer.bad)
                item = item._replace(outcome=pinned)
        except Exception as error:
            item = Fail(error)
        self._forward(item)

    def close(self) -> None:
        """Let the present copy end and discard the rest."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
                item.outcome.discard()


def _use_current_device() -> Callable[[], None]:
    if not torch.accelerator.is_available():
        return lambda: None
    device = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(device)
