"""Provides torch's random and distributed samplers with a small state, from which they resume in the same order.

Data path: [stateful] -> scheduler -> pool -> worker.

Both correspond to classes in torchdata's `stateful_dataloader`, and give the same orders. Their states are plain (text,
numbers, booleans): JSON and ``torch.load(weights_only=True)`` accept them.
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
"""Indices drawn at a time with replacement, as in torch and torchdata: the drawn numbers depend on it."""
_DROPPED = 1 << 15
"""Blocks drawn at a time to be dropped: 8 MB, 5 ms."""


class StatefulRandomSampler(RandomSampler):
    """torch's `RandomSampler` with its own generator, and with iterators that can be resumed.

    The constructor draws one number from torch's global generator, and nothing later does. All epochs come from the
    sampler's own generator, one after the other, so a loader that restores an iterator restores the order of every
    later epoch. ``iter(sampler)`` draws the epoch's first block: an iterator that is dropped has used up a permutation
    (or a block of 32). Several iterators at the same time advance the same generator.

    Arguments and errors are torch's. A `generator` is used instead of a new one: nothing is drawn from the global
    generator then. If other code draws from it, too, the epochs after a resumed epoch differ.
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
        """Return the next epoch's indices.

        Raises:
            ValueError: the dataset is empty.
        """
        return RandomIndices(self)


class RandomIndices(Iterator[int]):
    """One epoch of a `StatefulRandomSampler`, from a position on. Made by ``iter(sampler)``."""

    def __init__(self, sampler: StatefulRandomSampler, yielded: int = 0) -> None:
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
        self._go_to(yielded)

    def __next__(self) -> int:
        if self._yielded >= self._total:
            raise StopIteration
        if self._at == len(self._block):
            before = self._sampler.generator.get_state()
            try:
                block = self._draw().tolist()
            except BaseException:  # Ctrl-C: the next call draws the same block
                self._sampler.generator.set_state(before)
                raise
            self._block, self._at = block, 0
        index = self._block[self._at]
        self._at += 1
        self._yielded += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's position: a new dictionary of some 7 KB, with the same text for the whole epoch. O(1).

        Returns:
            ``generator``: the generator's state at the epoch's beginning, as base64 text; ``yielded``: the number of
            indices returned; ``length`` and ``replacement``, on which the order depends, too.
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
        """Continue at the state's position. The sampler's generator is set for this and later epochs.

        The order up to the position is drawn again, without a list of it.

        Raises:
            ValueError: the state is not valid, or of another dataset length or `replacement`. Nothing is changed.
        """
        state = _fields(state_dict, {"generator": str, "yielded": int, "length": int, "replacement": bool})
        for name, mine in (("length", self._size), ("replacement", self._sampler.replacement)):
            if state[name] != mine:
                raise ValueError(f"the state is of a sampler with {name}={state[name]}, but this one has {name}={mine}")
        if not 0 <= state["yielded"] <= self._total:
            raise ValueError(f"yielded should be between 0 and {self._total} in the state, but is {state['yielded']}")
        # The last check. An invalid state changes nothing.
        beginning = generator_state(state["generator"])
        self._sampler.generator.set_state(beginning)
        self._beginning = beginning
        self._beginning_text = None
        self._go_to(state["yielded"])

    def _go_to(self, yielded: int) -> None:
        """Go to the position after `yielded` indices; the generator has the state of the epoch's beginning."""
        self._yielded = yielded
        if self._size == 0:
            return
        # The first block is drawn when the epoch begins, each other block with its first index: so the number of
        # indices yielded determines the number of blocks drawn.
        size = _BLOCK if self._sampler.replacement else self._size
        before = max(0, yielded - 1) // size
        for first in range(0, before, _DROPPED if self._sampler.replacement else 1):
            self._draw(min(_DROPPED, before - first))
        self._block = self._draw().tolist()
        self._at = yielded - before * size

    def _draw(self, blocks: int = 1) -> torch.Tensor:
        """Return the next block, or with replacement this number of blocks; without it, the next permutation."""
        generator = self._sampler.generator
        where: Any = {"dtype": torch.int64, "device": generator.device, "generator": generator}
        if self._sampler.replacement:
            return torch.randint(high=self._size, size=(blocks * _BLOCK,), **where)
        return torch.randperm(self._size, **where)


class StatefulDistributedSampler(DistributedSampler[int]):
    """torch's `DistributedSampler` that can be resumed: its state is the number of indices that it has returned.

    The first iterator from which an index is taken after loading continues at the loaded position; later iterators
    begin at 0. Only the end of a pass is taken by ``iter(sampler)`` at once: a loader that resumes a finished epoch
    makes an iterator for it, reads nothing, and makes another. The epoch is not in the state: `set_epoch` sets it, and
    has an effect until the first index. Arguments and errors are torch's.

    Attributes:
        yielded: number of indices returned by the newest iterator.
        next_yielded: the loaded position that no iterator has taken yet, or None.
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
            # Taken now: this iterator has no first index with which the position would be taken.
            self.yielded, self.next_yielded = self.next_yielded, None
            return iter(())
        return _Rest(self)

    def state_dict(self) -> dict[str, int]:
        """Return ``{"yielded": n}``: the newest iterator's number, or a loaded number that is not taken yet."""
        return {"yielded": self.yielded if self.next_yielded is None else self.next_yielded}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iterator at the state's position. Other entries of the state are ignored.

        Raises:
            ValueError: the state is not valid, or its position is negative or after the epoch's end.
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
    """A pass of a `StatefulDistributedSampler`. It begins with its first index: loaders call ``iter()`` early, and some
    call it twice.
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
    """Return the named entries of a state, each of exactly the given type (True is not an integer).

    Raises:
        ValueError: an entry is missing or of another type, or the state is not a mapping. Begins like torchdata's
            message.
    """
    if not isinstance(state, Mapping):
        raise ValueError(  # noqa: TRY004 - ValueError, like every other error about a state
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
