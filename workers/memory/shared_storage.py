"""Notices that tensors of a batch are views of one storage: its bytes are copied once, and they share it afterwards.

Data path: worker: collate -> codec: [shared_storage] -> ring.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

from asyncloader.workers.memory.leaves import Dense, Strided

__all__ = ["SharedStorage", "SharedStorages"]


class SharedStorages:
    """The storages of one batch."""

    def __init__(self) -> None:
        self._found: dict[int, SharedStorage] = {}

    def of(self, storage: torch.UntypedStorage) -> SharedStorage:
        """The same one for the same storage."""
        key: int = storage._cdata
        shared = self._found.get(key)
        if shared is None:
            self._found[key] = shared = SharedStorage(storage)
        return shared

    def __iter__(self) -> Iterator[SharedStorage]:
        return iter(self._found.values())

    def clear(self) -> None:
        """Forget them."""
        self._found.clear()


class SharedStorage:
    """A storage and the range of it that the batch's tensors cover."""

    __slots__ = ("count", "first", "last", "offset", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.first = int(storage.nbytes())
        self.last = 0
        self.count = 0
        self.offset = 0

    @property
    def nbytes(self) -> int:
        """Length of the range."""
        return max(0, self.last - self.first)

    def include(self, first: int, last: int) -> None:
        """Extend the range by the bytes of one more object."""
        self.count += 1
        self.first = min(self.first, first // 16 * 16)  # aligned to the widest element
        self.last = max(self.last, last)

    def include_tensor(self, tensor: torch.Tensor) -> None:
        """Extend the range by a tensor."""
        if tensor.numel() == 0:
            return
        item = tensor.element_size()
        first = int(tensor.storage_offset()) * item
        reach = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.include(first, first + (reach + 1) * item)

    def spec(
        self, start: int, code: int, shape: tuple[int, ...], stride: tuple[int, ...], tensor: torch.Tensor
    ) -> Dense | Strided:
        """Return where a tensor is once the range is at `offset`."""
        if tensor.numel() == 0:
            return Strided(-1, 0, code, shape, stride, 0)
        if self.count == 1 and tensor.is_contiguous():
            return Dense(self.offset + start - self.first, tensor.numel(), code, shape)
        return Strided(self.offset, self.nbytes, code, shape, stride, (start - self.first) // tensor.element_size())

    def write(self, memory: mmap.mmap, offset: int) -> None:
        """Copy the range to a slot's memory."""
        if self.nbytes:
            source = torch.empty(0, dtype=torch.uint8).set_(self.storage, self.first, (self.nbytes,), (1,))
            torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=offset).copy_(source)
