"""What becomes of a batch between its slot and the consumer's stream.

Data path: delivery -> stage -> [mover] -> consumer.

`move` is called ahead of the consumer, by one thread: copies in one side stream, then the user's `device_transform` in
another. Each has an event of its own: memory is free again when it was copied, however long the transform takes.
`take` is called by the consumer's thread, and waits for nothing but on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncloader.device.accelerator import Accelerator, DoneEvent
from asyncloader.device.ranges import copy_ranges
from asyncloader.device.static import StaticTensors
from asyncloader.device.tensors import dense_parts, move, moved_tensors, only_tensors, tensors_of
from asyncloader.workers.error_notes import add_note

__all__ = ["Mover", "Ready"]

_Copy: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Ready(NamedTuple):
    """A batch whose copies have been asked for.

    Attributes:
        batch: the batch on the device.
        tensors: those of its tensors that are there.
        event: when they hold their values; None: now.
        copied: when nothing is read from the CPU's memory any more; None: now.
    """

    batch: Any
    tensors: list[torch.Tensor]
    event: DoneEvent | None
    copied: DoneEvent | None


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

    def move(self, batch: Any, *, locked: bool, slot: torch.Tensor | None = None) -> Ready:
        """Begin to copy a batch. Its memory must stay as it is until `Ready.copied`.

        Args:
            batch: in the CPU's memory.
            locked: that is page-locked; other memory is copied to such first.
            slot: the bytes that all of the batch lies in; None: its tensors are here and there.

        Raises:
            Exception: the transform's, or the device's; the memory is not read any more then.
        """
        accelerator = self.accelerator
        # Two iterators of a loader have a stage each; and a batch that takes the place of a lost one is moved by the
        # consumer's own thread.
        with self._turn, accelerator.work():
            with self._ended_by_error():
                moved = self._copied(batch, accelerator.copy if locked else self._copy_pinned, slot)
                copied = accelerator.event()
            there = self._there(moved)
            if self._transform is None:
                return Ready(moved, there, copied, copied)
            # What is left of the CPU's memory in the batch may be read by the transform's stream, too.
            only_copies = only_tensors(moved, self._is_there)
            with accelerator.compute(self._parts(there), copied), self._ended_by_error():
                moved = _called(self._transform, moved)
                done = accelerator.event()
            return Ready(moved, self._there(moved), done, copied if only_copies else done)

    @contextmanager
    def _ended_by_error(self) -> Generator[None]:
        """An error comes out when what was begun before it has ended."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the device may be what failed
                event = self.accelerator.event()
                if event is not None:
                    event.synchronize()
            raise

    def _copied(self, batch: Any, copy: _Copy, slot: torch.Tensor | None) -> Any:
        copies = copy_ranges(moved_tensors(batch), slot, copy)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            there = copies.get(id(tensor))
            return copy(tensor) if there is None else there

        return move(batch, self.accelerator.device, copied)

    def _copy_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.copy(self.accelerator.pin(tensor))

    def _there(self, batch: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_of(batch) if self._is_there(tensor)]

    def _parts(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part for tensor in tensors for part in dense_parts(tensor) if self._is_there(part)]

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.accelerator.device.type

    def take(self, ready: Ready) -> Any:
        """The batch, for the current stream of this thread."""
        self.accelerator.hand_over(self._parts(ready.tensors), ready.event)
        return ready.batch if self._static is None else self._static.fill(ready.batch, ready.tensors)


def _called(transform: Callable[[Any], Any], batch: Any) -> Any:
    try:
        return transform(batch)
    except AssertionError as error:
        if any(frame.f_code.co_filename.endswith("cudagraph_trees.py") for frame, _ in walk_tb(error.__traceback__)):
            add_note(
                error,
                "device_transform runs in a thread of the loader's, and ahead of you. What torch.compile("
                "mode='reduce-overhead') makes keeps its CUDA graphs by thread, and writes each result over the one "
                "before: compile with mode='default' or 'max-autotune-no-cudagraphs', or call it on the batches that "
                "you get.",
            )
        raise
