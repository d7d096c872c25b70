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
from asyncloader.samplers.stateful import RandomIndices, StatefulRandomSampler
from asyncloader.workers.fetch.seeding import derive

_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


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
