"""Copies batches to one device, runs `device_transform` on them, and passes them to the consumer's stream.

Data path: opener -> device_stage -> [transfer] -> consumer.

`start` is called ahead of the consumer, by one thread at a time. It copies in one side stream, then runs the user's
`device_transform` in another. Each has an event of its own, so that a slot is free once it was copied, however long the
transform takes. `take` is called in the consumer's thread; only the device's stream waits.

A copy costs some microseconds whatever its size, and a batch may have hundreds of tensors. They are neighbours in their
slot, so small ones are copied together and replaced by views of the copy. A large tensor is copied by itself: keeping
only a batch's labels must not keep the memory of its images. A tensor with gaps between its elements, or an expanded
one, is copied as the byte range that contains it, and viewed there. torch would first make a dense copy in ordinary
memory, and wait for the device to read that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncloader.delivery.accelerator import Accelerator, DoneEvent
from asyncloader.delivery.tensors import StaticTensors, dense_parts, move, moved_tensors, only_tensors, tensors_of

JOINED_BYTES = 1 << 20
"""The most bytes that are copied together, and so the most that a small tensor keeps of its batch's memory."""

_ALIGNMENT = 16  # bytes: the widest element
_MOST_GAPS = 2  # a range of more than this many times the tensor's own bytes is not copied whole


class _ByteRange(NamedTuple):
    """A tensor's bytes: `start` to `end` of `memory`, which other tensors may share. `base` identifies the memory."""

    base: int
    start: int
    end: int
    tensor: torch.Tensor
    memory: torch.Tensor | None


def copy_ranges(
    tensors: Sequence[torch.Tensor], slot: torch.Tensor | None, copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Copy the tensors. Returns the copies by ``id(tensor)``; other than plain strided CPU tensors are left out.

    Args:
        tensors: the tensors of one batch.
        slot: the bytes that contain the batch; None if no such range is known.
        copy: copies one tensor.
    """
    ranges = sorted((_byte_range(tensor, slot) for tensor in tensors if _is_plain(tensor)), key=lambda each: each[:3])
    copies: dict[int, torch.Tensor] = {}
    first = 0
    while first < len(ranges):
        base, start, end, tensor, memory = ranges[first]
        last = first + 1
        while last < len(ranges) and ranges[last].base == base:
            joined = max(end, ranges[last].end)
            # Ranges that overlap are joined whatever their size, or their bytes would be copied twice.
            if ranges[last].start >= end and (memory is not slot or slot is None or joined - start > JOINED_BYTES):
                break
            end, last = joined, last + 1
        group = ranges[first:last]
        if len(group) == 1 and _dense_bytes(tensor) == end - start:
            copies[id(tensor)] = copy(tensor)
        elif memory is None:
            copies[id(tensor)] = copy(tensor.contiguous())
        else:
            # So that each tensor's offset in the copy is a multiple of its element size, as `_view` needs.
            start -= start % _ALIGNMENT
            there = copy(memory[start:end])
            for part in group:
                copies[id(part.tensor)] = _view(there, part.start - start, part.tensor)
        first = last
    return copies


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def _byte_range(tensor: torch.Tensor, slot: torch.Tensor | None) -> _ByteRange:
    address, item = tensor.data_ptr(), tensor.element_size()
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (reach + 1) * item
    if slot is not None:
        start = address - slot.data_ptr()
        if start in range(slot.numel() - nbytes + 1) and start % item == 0:
            return _ByteRange(slot.data_ptr(), start, start + nbytes, tensor, slot)
    if nbytes > _MOST_GAPS * _dense_bytes(tensor):
        return _ByteRange(-address, 0, nbytes, tensor, None)
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    start = address - storage.data_ptr()
    return _ByteRange(storage.data_ptr(), start, start + nbytes, tensor, memory)


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(there: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    view = torch.empty(0, dtype=tensor.dtype, device=there.device)
    return view.set_(there.untyped_storage(), start // tensor.element_size(), tensor.shape, tensor.stride())


_Copy: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Ready(NamedTuple):
    """A batch whose copies were started.

    Attributes:
        batch: the batch on the device.
        tensors: the batch's tensors that are on the device.
        event: completes when the tensors hold their values; None: they do.
        copied: completes when the source memory is no longer read; None: it is not.
    """

    batch: Any
    tensors: list[torch.Tensor]
    event: DoneEvent | None
    copied: DoneEvent | None


class DeviceTransfer:
    """Copies batches to one device.

    Args:
        accelerator: the device.
        transform: the user's `device_transform`; None: the batch is delivered as it is.
        static: whether every batch is delivered in the same tensors (`static_buffers`).
    """

    def __init__(self, accelerator: Accelerator, transform: Callable[[Any], Any] | None, *, static: bool) -> None:
        self.accelerator = accelerator
        self._transform = transform
        self._static = StaticTensors() if static else None
        self._lock = threading.Lock()

    def start(self, batch: Any, *, locked: bool, slot: torch.Tensor | None = None) -> Ready:
        """Start to copy a batch. Its memory must not change before `Ready.copied`.

        Args:
            batch: the batch in the CPU's memory.
            locked: whether that memory is page-locked; if not, it is copied to page-locked memory first.
            slot: the bytes that contain the whole batch; None if no such range is known.

        Raises:
            Exception: the transform's, or the device's. The memory is no longer read then.
        """
        accelerator = self.accelerator
        # Two iterators of a loader have a stage each; and a batch of substitutes is transferred by the consumer's own
        # thread.
        with self._lock, accelerator.work():
            with self._ended_by_error():
                moved = self._copied(batch, accelerator.copy if locked else self._copy_pinned, slot)
                copied = accelerator.event()
            on_device = self._on_device_tensors(moved)
            if self._transform is None:
                return Ready(moved, on_device, copied, copied)
            # If the batch still refers to CPU memory, the transform's stream may read that, too.
            only_copies = only_tensors(moved, self._is_on_device)
            with accelerator.compute(self._parts(on_device), copied), self._ended_by_error():
                moved = self._transform(moved)
                done = accelerator.event()
            return Ready(moved, self._on_device_tensors(moved), done, copied if only_copies else done)

    @contextmanager
    def _ended_by_error(self) -> Generator[None]:
        """On an error, wait for the work that was started before it."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the device may be what failed
                event = self.accelerator.event()
                if event is not None:
                    # The caller frees the batch's memory on the error, and a copy may still be reading it.
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

    def _on_device_tensors(self, batch: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_of(batch) if self._is_on_device(tensor)]

    def _parts(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part for tensor in tensors for part in dense_parts(tensor) if self._is_on_device(part)]

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.accelerator.device.type

    def take(self, ready: Ready) -> Any:
        """The batch, for use in this thread's current stream."""
        self.accelerator.sync_current_stream(self._parts(ready.tensors), ready.event)
        return ready.batch if self._static is None else self._static.fill(ready.batch, ready.tensors)
