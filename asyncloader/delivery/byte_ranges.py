"""Copies the tensors of a batch as few ranges of bytes.

Data path: device_stage -> transfer -> [byte_ranges] -> accelerator.

A copy costs some microseconds whatever its size, and a batch may have hundreds of tensors. They are neighbours in their
slot, so small ones are copied together and replaced by views of the copy. A large tensor is copied by itself: keeping
only a batch's labels must not keep the memory of its images.

A tensor with gaps between its elements, or an expanded one, is copied as the byte range that contains it, and viewed
there. torch would first make a dense copy in ordinary memory, and wait for the device to read that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

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
