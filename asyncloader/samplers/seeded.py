"""Provides a shuffling sampler whose order depends on seed and epoch alone, computed block by block.

Data path: [seeded] -> scheduler -> pool -> worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from operator import index as as_index
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.surviving import Blocks

_BLOCK = 4096
"""Indices computed at a time: 0.3 to 0.5 ms of numpy, 32 KB."""


class SeededSampler(Sampler[int]):
    """Every index of a dataset once, shuffled by a seed and an epoch, in O(1) memory.

    torch's `RandomSampler` makes a list of all indices when an epoch begins, and draws its seed from the global
    generator. This sampler computes each block of indices when it is reached, and draws from no generator: the same
    seed and epoch give the same order on every machine, whatever was drawn before. Any loader can use it.

    Args:
        data_source: the dataset; only its length is used, which is read when an epoch begins.
        seed: 0 to 2**64 - 1.
        shuffle: False gives the indices in their order. Default True.

    Raises:
        ValueError: the seed is out of range.
    """

    def __init__(self, data_source: Sized, seed: int, *, shuffle: bool = True) -> None:
        Permutation(0, seed)  # checks the seed
        self.data_source = data_source
        self.seed = as_index(seed)
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, 0 to 2**64 - 1. Nothing else changes the epoch.

        Raises:
            ValueError: the epoch is out of range.
        """
        Permutation(0, self.seed, epoch)
        self.epoch = as_index(epoch)

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[int]:
        """Return the present epoch's order from position `start` on, without computing the positions before it.

        Raises:
            ValueError: `start` is not between 0 and the length.
        """
        size = len(self.data_source)
        if not 0 <= start <= size:
            raise ValueError(f"start should be between 0 and {size}, but got start={start}")
        order = self.order()
        return Blocks(lambda first: order(np.arange(first, min(first + _BLOCK, size))).tolist(), start)

    def order(self) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
        """Return the present epoch's order as a function from positions to indices, int64 arrays of any shape."""
        return Permutation(len(self.data_source), self.seed, self.epoch) if self.shuffle else _identity

    def positions_of(self, index: Any) -> list[int]:
        """Return the positions of an index in the present epoch's order, in O(1): one, or none if there is no such
        index.
        """
        size = len(self.data_source)
        # Also a tensor, as a batch of indices has it.
        index = -1 if isinstance(index, bool) or not hasattr(index, "__index__") else as_index(index)
        if not 0 <= index < size:
            return []
        order = Permutation(size, self.seed, self.epoch)
        return [int(order.positions(index) if self.shuffle else index)]

    def __repr__(self) -> str:
        return f"<SeededSampler of {len(self)}, seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle}>"


def _identity(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return positions
