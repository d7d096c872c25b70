"""Provides a shuffling sampler whose order depends on seed and epoch alone, computed block by block.

Data path: [seeded] -> scheduler -> pool -> worker.

In seeded mode the orders of torch's random samplers, too, are drawn from the seed and the epoch. torch draws them from
a generator of each process: ranks would share out different orders, and some samples would come twice and others never.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from operator import index as as_index
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.stateful import RandomIndices, StatefulRandomSampler
from asyncloader.samplers.surviving import Blocks
from asyncloader.workers.fetch.seeding import derive

T = TypeVar("T")

_BLOCK = 4096
"""Indices computed at a time: 0.3 to 0.5 ms of numpy, 32 KB."""


class EpochSampler(Sampler[T], Generic[T]):
    """Base of samplers whose order is a function of a seed and an epoch.

    Args:
        seed: 0 to 2**64 - 1.
        shuffle: False: the seed makes no difference.

    Raises:
        ValueError: the seed is out of range.
    """

    def __init__(self, seed: int, shuffle: bool = True) -> None:
        Permutation(0, seed)  # checks the seed
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

    def __iter__(self) -> Iterator[T]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[T]:
        """Return the present epoch's items from number `start` on.

        Raises:
            ValueError: `start` is not between 0 and the number of items.
        """
        raise NotImplementedError


class SeededSampler(EpochSampler[int]):
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
        super().__init__(seed, shuffle)
        self.data_source = data_source

    def __len__(self) -> int:
        return len(self.data_source)

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

    def __repr__(self) -> str:
        return f"<SeededSampler of {len(self)}, seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle}>"


def _identity(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return positions


_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SeededDraws(EpochSampler[int]):
    """A random sampler of torch's whose order depends on seed and epoch alone: the same on every rank.

    Args:
        sampler: a random sampler of torch's, without its own generator.
        seed: the loader's.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        super().__init__(seed)
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def iter_from(self, start: int) -> Iterator[int]:
        """Return the present epoch's order from position `start` on. A plain permutation is that of ``shuffle=True``;
        a `RandomSampler` of another number of samples, or with replacement, is drawn as needed; other orders are drawn
        as a whole, as in torch.

        Raises:
            ValueError: `start` is not between 0 and the length.
        """
        sampler, size = self.sampler, len(self.sampler)
        if not 0 <= start <= size:
            raise ValueError(f"start should be between 0 and {size}, but got start={start}")
        if type(sampler) is RandomSampler and not sampler.replacement and size == len(sampler.data_source):
            order = SeededSampler(sampler.data_source, self.seed)
            order.set_epoch(self.epoch)
            return order.iter_from(start)
        generator = torch.Generator(device="cpu")
        generator.manual_seed(derive(self.seed, "sampler", self.epoch))
        if type(sampler) is RandomSampler:
            return RandomIndices(
                StatefulRandomSampler(sampler.data_source, sampler.replacement, size, generator), start
            )
        drawn = copy.copy(sampler)
        drawn.generator = generator
        with torch.device("cpu"):
            return iter(list(drawn)[start:])


def with_seeded_draws(sampler: Any, seed: int | None) -> Any:
    """Return the sampler, or batch sampler, that replaces the user's with this seed. In torch mode (`seed` None)
    torch's samplers draw from their own generators.
    """
    if type(sampler) is BatchSampler:
        inner = with_seeded_draws(sampler.sampler, seed)
        return sampler if inner is sampler.sampler else BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if type(sampler) is SeededDraws:  # of another loader, from which this loader gets its sampler
        sampler = sampler.sampler
    if seed is None or type(sampler) not in _DRAWN or sampler.generator is not None:
        return sampler
    return SeededDraws(sampler, seed)
