"""Provides torch's random and distributed samplers with a small state, from which they resume in the same order.

Data path: [stateful] -> scheduler -> pool -> worker.

Both have the meaning of the classes for the same purpose in torchdata's `stateful_dataloader`, and give the same
orders. Their states are plain (text, numbers, booleans): JSON and ``torch.load(weights_only=True)`` accept them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler

from asyncloader.samplers.generators import generator_state
from asyncloader.workers.fetch.seeding import draw_seed

_BLOCK = 32
"""Indices drawn at a time with replacement, as torch and torchdata draw them: it decides which numbers come out."""


class StatefulRandomSampler(RandomSampler):
    """torch's `RandomSampler` whose iterators can be resumed, with a generator of its own.

    One number is drawn from torch's global generator when the sampler is made, and none later. All epochs come from the
    sampler's own generator, one after the other, so a loader that restores one iterator restores the order of every
    epoch to come. ``iter(sampler)`` draws the epoch's first block: an iterator that is thrown away has used up one
    permutation (or one block of 32). Of several iterators alive at once each advances the same generator.

    Args:
        data_source: the dataset; only its length is used, which is read when an epoch begins.
        replacement: draw every index independently. Default False: permutations, one after the other.
        num_samples: indices in an epoch; more than the dataset has are several permutations. Default: its length.
        generator: used instead of one of its own, and then also advanced by its other users: epochs after a
            resumed one are identical only if there are none. Nothing is drawn from the global generator.

    Raises:
        TypeError: `replacement` is not a boolean.
        ValueError: `num_samples`, or the dataset's length, is not positive.
    """

    generator: torch.Generator

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        if generator is None:
            self.generator = torch.Generator()
            self.generator.manual_seed(draw_seed())

    def __iter__(self) -> RandomIndices:
        """The next epoch's indices.

        Raises:
            ValueError: there is nothing to draw from.
        """
        return RandomIndices(self)


class RandomIndices(Iterator[int]):
    """One epoch of a `StatefulRandomSampler`. Made by ``iter(sampler)``."""

    def __init__(self, sampler: StatefulRandomSampler) -> None:
        self._sampler = sampler
        self._size = len(sampler.data_source)
        self._total = sampler.num_samples
        if self._size == 0 and self._total > 0:
            raise ValueError(f"cannot draw {self._total} samples from an empty dataset")
        self._beginning = sampler.generator.get_state()
        self._beginning_text: str | None = None
        self._yielded = 0
        self._block: list[int] = []
        self._at = 0
        self._go_to(0)

    def __next__(self) -> int:
        if self._yielded >= self._total:
            raise StopIteration
        if self._at == len(self._block):
            before = self._sampler.generator.get_state()
            try:
                block = self._draw().tolist()
            except BaseException:  # Ctrl-C: the next call draws the same
                self._sampler.generator.set_state(before)
                raise
            self._block, self._at = block, 0
        index = self._block[self._at]
        self._at += 1
        self._yielded += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch stands: a new dictionary of some 7 KB, the same text for the whole epoch. O(1).

        Returns:
            ``generator``: the generator's state at the epoch's beginning, as base64 text; ``yielded``: how many indices
            were given; ``length`` and ``replacement``: what the order depends on besides.
        """
        if self._beginning_text is None:
            self._beginning_text = base64.b64encode(self._beginning.numpy().tobytes()).decode("ascii")
        return {
            "generator": self._beginning_text,
            "yielded": self._yielded,
            "length": self._size,
            "replacement": self._sampler.replacement,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the sampler's generator is set accordingly, for this and later epochs.

        The order up to there is drawn again, and no list is made of it.

        Raises:
            ValueError: it is not such a state, or one of another dataset length or kind of drawing. Nothing is changed.
        """
        state = _fields(state_dict, {"generator": str, "yielded": int, "length": int, "replacement": bool})
        for name, mine in (("length", self._size), ("replacement", self._sampler.replacement)):
            if state[name] != mine:
                raise ValueError(f"the state is of a sampler with {name}={state[name]}, but this one has {name}={mine}")
        if not 0 <= state["yielded"] <= self._total:
            raise ValueError(f"yielded should be between 0 and {self._total} in the state, but is {state['yielded']}")
        beginning = generator_state(state["generator"])
        self._sampler.generator.set_state(beginning)
        self._beginning = beginning
        self._beginning_text = None
        self._go_to(state["yielded"])

    def _go_to(self, yielded: int) -> None:
        """Stand after `yielded` indices of the epoch; the generator is as it was at the epoch's beginning.

        The first block is drawn when the epoch begins, each other one when its first index is asked for: so the number
        of indices yielded tells how many blocks have been drawn.
        """
        self._yielded = yielded
        if self._size == 0:
            return
        size = _BLOCK if self._sampler.replacement else self._size
        before = max(0, yielded - 1) // size
        for _ in range(before):
            self._draw()
        self._block = self._draw().tolist()
        self._at = yielded - before * size

    def _draw(self) -> torch.Tensor:
        generator = self._sampler.generator
        where: Any = {"dtype": torch.int64, "device": generator.device, "generator": generator}
        if self._sampler.replacement:
            return torch.randint(high=self._size, size=(_BLOCK,), **where)
        return torch.randperm(self._size, **where)


class StatefulDistributedSampler(DistributedSampler[int]):
    """torch's `DistributedSampler` that can be resumed: its state is how many indices it has given.

    A loaded position is taken by the first iterator that is asked for an index after loading; the next ones begin at 0.
    Only the end of a pass is taken by ``iter(sampler)`` at once: a loader that resumes a finished epoch makes one
    iterator for it, reads nothing, and makes another. The epoch is not in the state: `set_epoch` sets it, which counts
    until the first index.

    Args:
        dataset: only its length is used.
        num_replicas: number of processes. Default: torch.distributed's.
        rank: which of them this is. Default: torch.distributed's.
        shuffle: permute by seed and epoch. Default True.
        seed: the same in all processes. Default 0.
        drop_last: drop the tail that does not divide evenly. Default False: indices are repeated.

    Attributes:
        yielded: indices given by the newest iterator.
        next_yielded: the position that was loaded and not yet taken, or None.

    Raises:
        ValueError: `rank` is out of range.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.yielded = 0
        self.next_yielded: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.next_yielded is None:
            self.yielded = 0
        elif self.next_yielded == self.num_samples:
            self.yielded, self.next_yielded = self.next_yielded, None
            return iter(())
        return _Rest(self)

    def state_dict(self) -> dict[str, int]:
        """``{"yielded": n}``: what the newest iterator has given, or what was loaded and is not yet taken."""
        return {"yielded": self.yielded if self.next_yielded is None else self.next_yielded}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iterator begins after the state's position. Other entries of the state are ignored.

        Raises:
            ValueError: it is not such a state, is negative or greater than an epoch.
        """
        yielded = _fields(state_dict, {"yielded": int})["yielded"]
        if yielded < 0:
            raise ValueError("Cannot load state_dict with negative yielded value")
        if yielded > self.num_samples:
            raise ValueError(
                f"Cannot load state_dict with yielded value {yielded}: an epoch of this sampler has {self.num_samples}"
            )
        self.next_yielded = yielded


class _Rest(Iterator[int]):
    """A pass of a `StatefulDistributedSampler`. It begins when the first index is asked for: loaders call ``iter()``
    early, and some twice.
    """

    def __init__(self, sampler: StatefulDistributedSampler) -> None:
        self._sampler = sampler
        self._indices: list[int] | None = None
        self._size = self._at = 0

    def __next__(self) -> int:
        sampler, indices = self._sampler, self._indices
        if indices is None:
            indices = list(DistributedSampler.__iter__(sampler))
            size = len(indices)
            self._at = sampler.yielded = sampler.next_yielded or 0
            sampler.next_yielded = None
            self._indices, self._size = indices, size
        if self._at >= self._size:
            raise StopIteration
        index = indices[self._at]
        self._at += 1
        sampler.yielded = self._at
        return index


def _fields(state: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The named entries of a state, each of exactly the type given (True is no integer).

    Raises:
        ValueError: one is missing or of another type, or the state is no mapping. Begins as torchdata's message.
    """
    if not isinstance(state, Mapping):
        raise ValueError(  # noqa: TRY004  as every other thing that is wrong with a state
            f"Invalid state_dict: it should be a dictionary, but is {type(state).__name__}"
        )
    missing = sorted(set(kinds) - set(state))
    if missing:
        raise ValueError(f"Invalid state_dict: without {', '.join(missing)}")
    for name, kind in kinds.items():
        if type(state[name]) is not kind:
            raise ValueError(
                f"Invalid state_dict: {name} should be of type {kind.__name__}, but is {state[name]!r:.100}"
            )
    return {name: state[name] for name in kinds}
