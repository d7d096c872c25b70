"""Ctrl-C in one of our samplers loses nothing: the indices are those of an undisturbed epoch, wherever it strikes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler

from asyncloader import (
    BucketBatchSampler,
    DataLoader,
    MixtureSampler,
    SeededSampler,
    StatefulDistributedSampler,
    StatefulRandomSampler,
    TokenBudgetBatchSampler,
)
from asyncloader.base.topology import Topology
from asyncloader.integrations.ray import BlockSampler
from asyncloader.samplers import surviving
from asyncloader.samplers.distributed import RankView, Share
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.samplers.surviving import Blocks, Groups, Restarting
from tests.drawn import scaled

FOLDER = str(Path(surviving.__file__).parent)


class Striking:
    """Within `next`, raises KeyboardInterrupt now and then where CPython could raise it: at calls, in our samplers."""

    def __init__(self, draw: random.Random) -> None:
        self.left = draw.randrange(1, 40)
        self.draw = draw
        self.struck = 0

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event == "return" or not frame.f_code.co_filename.startswith(FOLDER):
            return
        self.left -= 1
        if not self.left:
            self.left = self.draw.randrange(1, 400)
            self.struck += 1
            raise KeyboardInterrupt

    def next(self, items: Iterator[Any]) -> Any:
        """The next item, by one call from C as the loader makes it."""
        found: list[Any] = []
        sys.setprofile(self)
        try:
            found.extend(map(next, (items,)))
        finally:
            sys.setprofile(None)
        if not found:
            raise StopIteration
        return found[0]


LENGTHS = torch.randint(1, 50, (300,), generator=torch.Generator().manual_seed(1)).numpy()
BLOCKS: Any = SimpleNamespace(block_sizes=[70, 0, 30, 50])  # of a Ray dataset
SHARE = Share(4, False, Topology(1, 2), "drop")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Pulling(Iterator[Any]):
    """Pulls indices as the loader does: after an interrupt, again for the same task."""

    def __init__(self, sampler: Any) -> None:
        self.stream = IndexStream(sampler, iter(sampler))
        self.task = 0

    def __next__(self) -> Any:
        _, index = self.stream.pull(self.task)
        self.task += 1
        return index


SAMPLERS: dict[str, Callable[[], Iterator[Any]]] = {
    "seeded": lambda: iter(SeededSampler(range(9000), 1)),
    "mixture": lambda: iter(MixtureSampler([range(50), range(200)], [1, 2], 1)),
    "bucket": lambda: iter(BucketBatchSampler(LENGTHS, 4, 1, window=32)),
    "tokens": lambda: TokenBudgetBatchSampler(LENGTHS, 200, 1, window=64).iter_from(3),
    "ranks of indices": lambda: iter(RankView(SeededSampler(range(9000), 1), SHARE)),
    "ranks of a mixture": lambda: RankView(MixtureSampler([range(90), range(70)], [1, 2], 1), SHARE).iter_from(2),
    "ranks of a list": lambda: iter(RankView(range(203), SHARE)),
    "blocks": lambda: iter(BlockSampler(BLOCKS, 1)),
    "stateful": lambda: iter(StatefulRandomSampler(range(100), generator=generator())),
    "stateful, replacing": lambda: iter(StatefulRandomSampler(range(100), replacement=True, generator=generator())),
    "stateful, of a rank": lambda: iter(StatefulDistributedSampler(range(100), 2, 1)),
    "stream": lambda: Pulling(BatchSampler(StatefulRandomSampler(range(100), generator=generator()), 3, True)),
}


@pytest.mark.parametrize("name", [*SAMPLERS])
def test_each_sampler_survives(name: str) -> None:
    """The sampler is interrupted at randomly drawn calls, again and again."""
    expected, struck = [*SAMPLERS[name]()], 0
    for seed in range(scaled(20)):
        striking, items, found = Striking(random.Random(seed)), SAMPLERS[name](), []
        while True:
            try:
                found.append(striking.next(items))
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
        assert found == expected
        struck += striking.struck
    assert struck


def failing_once(items: Iterator[int], at: set[int]) -> Iterator[int]:
    """An iterator that raises before some of its items, and goes on."""

    class Failing:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            if at and min(at) == self.given:
                at.remove(self.given)
                raise KeyboardInterrupt
            self.given += 1
            return next(items)

        given = 0

    return Failing()


def all_of(items: Iterator[Any]) -> tuple[list[Any], int]:
    found: list[Any] = []
    interrupts = 0
    while True:
        try:
            found.append(next(items))
        except KeyboardInterrupt:
            interrupts += 1
        except StopIteration:
            return found, interrupts


def test_the_parts() -> None:
    """An interrupted generator is begun again, a block computed again, and a group filled up."""
    bad = {3, 5}

    def begin(position: int) -> Iterator[int]:
        for number in range(position, 8):
            if number in bad:
                bad.remove(number)
                raise KeyboardInterrupt
            yield number

    def block(position: int) -> list[int]:
        if position in bad:
            bad.remove(position)
            raise KeyboardInterrupt
        return [*range(position, min(position + 2, 9))]

    assert all_of(Restarting(begin, 2)) == ([2, 3, 4, 5, 6, 7], 2)
    bad = {4, 6}
    assert all_of(Blocks(block, 0)) == ([*range(9)], 2)
    numbered = Groups(lambda: failing_once(iter(range(7)), {1, 2, 5}), 3, lambda number, group: (number, group), 4)
    assert all_of(numbered) == ([(4, [0, 1, 2]), (5, [3, 4, 5]), (6, [6])], 3)
    whole = Groups(lambda: iter(range(6)), 3, lambda _, group: group if len(group) == 3 else None)
    assert all_of(whole) == ([[0, 1, 2], [3, 4, 5]], 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_goes_on_after_it(workers: int) -> None:
    """In a loader with a seed, an interrupt in the sampler neither ends the epoch nor is recorded as its end."""
    with DataLoader[Any](range(600), batch_size=3, shuffle=True, seed=1, num_workers=workers) as loader:  # type: ignore[arg-type]
        expected = [batch.tolist() for batch in loader]
    with DataLoader[Any](range(600), batch_size=3, shuffle=True, seed=1, num_workers=workers) as loader:  # type: ignore[arg-type]
        striking, found = Striking(random.Random(1)), []
        batches = iter(loader)
        while True:
            try:
                found.append(striking.next(batches).tolist())
            except KeyboardInterrupt:
                assert not loader.state_dict()["finished"]
            except StopIteration:
                break
        assert striking.struck
        if workers:
            assert found == expected
        else:  # as with torch, the batch that was asked for when it struck may be lost
            assert len(found) >= len(expected) - striking.struck
            assert [batch for batch in expected if batch in found] == found
        assert loader.state_dict()["finished"]
