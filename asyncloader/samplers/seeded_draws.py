"""Draws the orders of torch's random samplers from a seed and an epoch, in seeded mode.

Data path: [seeded_draws] -> scheduler. torch draws them from a generator of each process: ranks would share out
different orders, and some samples would come twice and others never.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from asyncloader.samplers.seeded import SeededSampler
from asyncloader.samplers.surviving import Blocks
from asyncloader.workers.fetch.seeding import derive

_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_BLOCK = 4096
"""Indices drawn at a time with replacement: some 0.1 ms."""
_DROPPED = 1 << 20
"""Indices drawn at a time to be dropped: 8 MB, 5 ms."""


class SeededDraws(Sampler[int]):
    """A random sampler of torch's whose order depends on seed and epoch alone: the same on every rank.

    Args:
        sampler: a random sampler of torch's, without its own generator.
        seed: the loader's.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

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
            return Blocks(_Draws(sampler, generator, start).block, start)
        drawn = copy.copy(sampler)
        drawn.generator = generator
        with torch.device("cpu"):
            return iter(list(drawn)[start:])


class _Draws:
    """Draws the indices of torch's `RandomSampler` block by block, the same as its iterator.

    Args:
        sampler: the sampler.
        generator: draws them, and is used by nothing else.
        start: the first position. The indices before it are drawn, and dropped.
    """

    def __init__(self, sampler: RandomSampler, generator: torch.Generator, start: int) -> None:
        self._sampler = sampler
        self._generator = generator
        self._first, self._block = -1, list[int]()
        size = _DROPPED if sampler.replacement else len(sampler.data_source)
        for _ in range(start // size):
            self._draw(size)
        if sampler.replacement:
            self._draw(start % size)

    def _draw(self, count: int) -> torch.Tensor:
        """Return the next permutation; with replacement, this number of indices: drawn 32 at a time, as by torch, they
        would be the same.
        """
        size = len(self._sampler.data_source)
        with torch.device("cpu"):
            if self._sampler.replacement:
                return torch.randint(size, (count,), dtype=torch.int64, generator=self._generator)
            return torch.randperm(size, generator=self._generator)

    def block(self, first: int) -> list[int]:
        """Return the indices from a position on: where the block before ended, or began if Ctrl-C has lost it."""
        if first != self._first:
            before = self._generator.get_state()
            left = len(self._sampler) - first
            try:
                drawn = self._draw(min(_BLOCK, left))
                # A permutation may begin before the position, and be longer than what is left.
                within = 0 if self._sampler.replacement else first % len(drawn)
                block = drawn[within : within + left].tolist()
            except BaseException:  # the next call draws the same block
                self._generator.set_state(before)
                raise
            self._first, self._block = first, block
        return self._block


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
