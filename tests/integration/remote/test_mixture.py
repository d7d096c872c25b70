"""`Mixture`: the same global sequence on any workers and ranks, also after a death or a resume with other numbers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader, Mixture, RemoteIterableDataset, sample_rng
from asyncloader.errors import StateError
from tests.helpers.remote_folders import make_shards
from tests.unit.remote.shards import number_of

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

GLOBAL = 6
EPOCHS = 3
WEIGHTS = [2, 1]
SIZES = {"map": 31, "awaited": 10, "tar": 17, "jsonl": 11}
FIRST = {"map": 0, "awaited": 100, "tar": 500, "jsonl": 700}


class Rows(Dataset[Any]):
    """The numbers from `first` on, each with a random number of its own in the thousands."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.first + index + 1000 * int(sample_rng().numpy.integers(1000))


class AwaitedRows(Rows):
    """The same, awaited, and only in its context."""

    entered = 0

    @asynccontextmanager
    async def _context(self) -> AsyncGenerator[None, None]:
        self.entered += 1
        yield
        self.entered -= 1

    async def __aenter__(self) -> Any:
        self._opened = self._context()
        await self._opened.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._opened.__aexit__(None, None, None)

    async def __getitem__(self, index: int) -> Any:
        assert self.entered
        return super().__getitem__(index)


def decoded(sample: Any) -> Any:
    """The number of a sample of any source."""
    if not isinstance(sample, dict):
        return sample
    return number_of(sample) + FIRST["tar" if sample["__url__"].endswith(".tar") else "jsonl"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    for name, sizes, ending in (("a", (2, 3, 4, 3, 2, 3), "tar"), ("b", (6, 5), "jsonl")):
        (made / name).mkdir()
        make_shards(made / name, sizes, ending=ending)
    return made


COMBINATIONS = {
    "map+map": ("map", "awaited"),
    "stream+stream": ("tar", "jsonl"),
    "map+stream": ("map", "tar"),
    "stream+map": ("jsonl", "map"),
}


def source_of(folder: Path, name: str) -> Any:
    if name == "map":
        return Rows(FIRST[name], SIZES[name])
    if name == "awaited":
        return AwaitedRows(FIRST[name], SIZES[name])
    buffer = 4 if name == "tar" else 0
    return RemoteIterableDataset(f"{folder}/{'a' if name == 'tar' else 'b'}/", shuffle_buffer=buffer, streams=2)


def loader_of(folder: Path, names: tuple[str, ...], *, kind: Any = DataLoader, ranks: int = 1, **options: Any) -> Any:
    mixture = {name: options.pop(name) for name in ("on_exhausted", "num_samples", "lengths") if name in options}
    weights = options.pop("weights", WEIGHTS)
    dataset = Mixture([source_of(folder, name) for name in names], weights, **mixture)
    if ranks > 1:
        options |= {"world_size": ranks}
    return kind(dataset, **{"batch_size": GLOBAL // ranks, "seed": 3, "decode": decoded} | options)


def epochs_of(loader: Any, count: int = EPOCHS) -> list[list[list[int]]]:
    with loader:
        return [[batch.tolist() for batch in loader] for _ in range(count)]


def expected_of(folder: Path, names: tuple[str, ...], how: Any) -> list[list[list[int]]]:
    return epochs_of(loader_of(folder, names, on_exhausted=how))


WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "forkserver": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "threads"},
}


@pytest.mark.parametrize("how", ["repeat", "stop", "drop"])
@pytest.mark.parametrize("names", COMBINATIONS.values(), ids=COMBINATIONS)
def test_shares_and_passes(folder: Path, names: tuple[str, ...], how: str) -> None:
    """Each prefix has the exact shares, each pass over a source has its samples once, and passes differ."""
    found = [[number % 1000 for batch in epoch for number in batch] for epoch in expected_of(folder, names, how)]
    sizes = [SIZES[name] for name in names]
    taken: list[list[int]] = [[], []]
    for epoch in found:
        assert len(epoch) == (len(found[0]) if how == "stop" else sum(sizes))
        for number in epoch:
            taken[not FIRST[names[0]] <= number < FIRST[names[0]] + sizes[0]].append(number)
            total = sum(map(len, taken))
            if how == "repeat":
                assert abs(len(taken[0]) - Fraction(2, 3) * total) <= Fraction(1, 2)
    for name, source, size in zip(names, taken, sizes, strict=True):
        passes = [source[at : at + size] for at in range(0, len(source), size)]
        *whole, last = passes if len(source) % size else [*passes, []]
        assert [sorted(each) for each in whole] == [list(range(FIRST[name], FIRST[name] + size))] * len(whole)
        assert len({*last}) == len(last)
        if len(whole) > 1 and name != "jsonl":
            assert whole[0] != whole[1]


@pytest.mark.parametrize("workers", ["none", pytest.param("forkserver", marks=pytest.mark.thorough), "threads"])
@pytest.mark.parametrize("how", ["repeat", "stop", "drop"])
@pytest.mark.parametrize("names", COMBINATIONS.values(), ids=COMBINATIONS)
def test_any_workers_and_ranks(folder: Path, names: tuple[str, ...], how: str, workers: str) -> None:
    """The ranks' batches, joined, are the global batches of one process without workers; so are those of a run that
    was stopped, and goes on with other ranks and workers.
    """
    options: dict[str, Any] = {"on_exhausted": how} | WORKERS[workers]
    whole = expected_of(folder, names, how)
    if workers != "none":
        assert epochs_of(loader_of(folder, names, **options)) == whole
    found, states = [], []
    for rank in range(2):
        with loader_of(
            folder, names, ranks=2, rank=rank, on_uneven="pad", **(options if rank else {"on_exhausted": how})
        ) as loader:
            for _ in loader:
                pass
            batches = iter(loader)
            found.append([next(batches).tolist() for _ in range(2)])
            states.append(json.dumps(loader.state_dict() | {"world_size": None}))
            del batches
    assert states[0] == states[1]
    assert [[*chain(*parts)] for parts in zip(*found, strict=True)] == whole[1][:2]
    with loader_of(folder, names, num_workers=1, workers="threads", on_exhausted=how) as loader:
        loader.load_state_dict(json.loads(states[0]))
        assert [batch.tolist() for batch in loader] == whole[1][2:]
        assert [batch.tolist() for batch in loader] == whole[2]


def shares(epoch: list[list[int]]) -> Fraction:
    """The share of the samples of the map dataset."""
    numbers = [number % 1000 for batch in epoch for number in batch]
    return Fraction(sum(number < 500 for number in numbers), len(numbers))


def test_weights_change_by_epoch(folder: Path) -> None:
    """Given weights hold from their epoch on; fed back weights from the next; a resumed run keeps both."""
    names = COMBINATIONS["map+stream"]
    options: dict[str, Any] = {"weights": {0: [1, 1], 2: [1, 3]}, "num_samples": 48}
    assert [shares(epoch) for epoch in epochs_of(loader_of(folder, names, **options), 4)] == [
        Fraction(1, 2), Fraction(1, 2), Fraction(1, 4), Fraction(1, 4),
    ]  # fmt: skip
    with loader_of(folder, names, **options) as loader:
        batches = iter(loader)
        first = [next(batches).tolist() for _ in range(2)]
        loader.feedback([5, 1])
        state = json.loads(json.dumps(loader.state_dict()))
        first += [batch.tolist() for batch in batches]
        ended = json.loads(json.dumps(loader.state_dict()))
        second = [batch.tolist() for batch in loader]
        third = [batch.tolist() for batch in loader]
    assert [shares(first), shares(second), shares(third)] == [Fraction(1, 2), Fraction(5, 6), Fraction(1, 4)]
    for saved, begins in ((state, first[2:]), (ended, None)):
        with loader_of(folder, names, num_workers=2, workers="threads", **options) as loader:
            loader.load_state_dict(saved)
            if begins is not None:
                assert [batch.tolist() for batch in loader] == begins
            assert [batch.tolist() for batch in loader] == second
            assert [batch.tolist() for batch in loader] == third
        with loader_of(folder, names) as loader:
            loader.load_state_dict(saved)
            with pytest.raises(StateError, match="weights="):
                list(loader)


@pytest.mark.parametrize("workers", ["none", "threads"])
def test_feedback_holds_from_the_next_epoch_that_begins(folder: Path, workers: str) -> None:
    """Also if it comes between epochs, with the last batch, or before the first epoch."""
    names = COMBINATIONS["map+stream"]
    options = WORKERS[workers] | {"persistent_workers": bool(WORKERS[workers])}
    with loader_of(folder, names, weights=[1, 1], num_samples=48) as loader:
        loader.feedback([1, 3])
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(folder, names, weights=[1, 1], num_samples=48, **options) as loader:
        loader.load_state_dict(state)
        found = []
        for weights in ([1, 1], [3, 1]):
            epoch = [batch.tolist() for batch in loader]
            loader.feedback(weights)
            found.append(shares(epoch))
        epoch = []
        for batch in loader:
            epoch.append(batch.tolist())
            if len(epoch) == len(loader):
                loader.feedback([5, 1])
        found += [shares(epoch), shares([batch.tolist() for batch in loader])]
    assert found == [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(5, 6)]


@pytest.mark.parametrize("workers", ["none", "threads"])
@pytest.mark.parametrize("iterated", [False, True], ids=["loaded", "iterated"])
def test_feedback_behind_a_loaded_state(folder: Path, workers: str, iterated: bool) -> None:
    """Before the first batch, too: a begun epoch stays as it was, an epoch that follows has the weights, and the state
    has them at once.
    """
    names = COMBINATIONS["map+stream"]
    options: dict[str, Any] = {"weights": [1, 1], "num_samples": 48}
    with loader_of(folder, names, **options) as loader:
        loader.feedback([1, 3])
        batches = iter(loader)
        epoch = [next(batches).tolist() for _ in range(2)]
        begun = json.loads(json.dumps(loader.state_dict()))
        epoch += [batch.tolist() for batch in batches]
        ended = loader.state_dict()
    for saved, rest in ((begun, epoch[2:]), (ended, None)):
        with loader_of(folder, names, **options, **WORKERS[workers]) as loader:
            loader.feedback([1, 7])  # which the state replaces
            loader.load_state_dict(saved)
            batches = iter(loader) if iterated and rest is not None else loader
            loader.feedback([5, 1])
            state = json.loads(json.dumps(loader.state_dict()))
            found = [[batch.tolist() for batch in each] for each in ([] if rest is None else [batches])]
            found += [[batch.tolist() for batch in loader]]
        assert (found[0], shares(found[-1])) == (rest or found[0], Fraction(5, 6))
        with loader_of(folder, names, **options) as loader:
            loader.load_state_dict(state)
            assert found == epochs_of(loader, len(found))


@pytest.mark.parametrize(
    "feedback", [None, 3, [[1]], [["1", [1, 2]]], [[1, [1]]], [[1, [0, 0]]], [[1, [1, -1]]], [[1 << 64, [1, 1]]]]
)
def test_a_broken_state_is_refused(folder: Path, feedback: Any) -> None:
    """Weights that nobody can have given do not reach the order."""
    names = COMBINATIONS["map+map"]
    with loader_of(folder, names) as loader:
        next(iter(loader))
        state = loader.state_dict()
    state["sampler"]["sampler"]["feedback"] = feedback
    with loader_of(folder, names) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="the state is broken"):
            list(loader)


def test_a_loader_that_shuffles(folder: Path) -> None:
    """``shuffle=True`` shuffles every source, also those that the mixture takes in their order."""
    stream = RemoteIterableDataset(f"{folder}/a/", streams=2)
    mixture = Mixture([source_of(folder, "map"), stream], [1, 1], on_exhausted="drop", shuffle=False)
    options: dict[str, Any] = {"batch_size": GLOBAL, "seed": 3, "decode": decoded}
    (plain,), (shuffled,) = (epochs_of(DataLoader[Any](mixture, **options, shuffle=how), 1) for how in (None, True))
    for first in (FIRST["map"], FIRST["tar"]):
        before, after = (
            [n % 1000 for batch in each for n in batch if n % 1000 // 100 == first // 100] for each in (plain, shuffled)
        )
        assert before
        assert sorted(before) == sorted(after)
        assert before != after


def test_shares_of_tokens(folder: Path) -> None:
    """Over whole passes each source has its share of the tokens."""
    names = COMBINATIONS["map+stream"]
    lengths = np.arange(SIZES["map"]) + 5
    mean = Fraction(int(lengths.sum()), len(lengths))
    for given in (mean, np.float32(mean), torch.tensor(int(mean))):
        epoch = epochs_of(loader_of(folder, names, lengths=[given, 40], num_samples=600), 1)[0]
        rows = Fraction(shares(epoch))
        assert abs(rows * mean / (rows * mean + (1 - rows) * 40) - Fraction(2, 3)) < Fraction(1, 200)


class Endless(IterableDataset[int]):
    """A stream whose samples are not counted."""

    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("sources", "weights", "options", "error", "text"),
    [
        ([Rows(0, 3)], [1, 2], {}, ValueError, "one weight a source, but got 2 for 1"),
        ([Rows(0, 3)], [0], {}, ValueError, "at least one weight"),
        ([Rows(0, 3)], {1: [1]}, {}, ValueError, "begin with epoch 0"),
        ([Rows(0, 3)], [1], {"num_samples": 2.5}, TypeError, "as an integer"),
        ([Rows(0, 3)], [1], {"lengths": [float("nan")]}, TypeError, "but got nan"),
        ([Rows(0, 3)], [1], {"lengths": []}, ValueError, "lengths for each source"),
        ([Rows(0, 3)], [1], {"lengths": [0]}, ValueError, "should be positive"),
        ([Rows(0, 3)], [1], {"lengths": [[1, 2, 3]]}, TypeError, "give the mean: Fraction"),
        ([RemoteIterableDataset("a.tar")], [1], {}, TypeError, "without streams="),
        ([Endless()], [1], {}, TypeError, "are not counted"),
        ([object()], [1], {}, TypeError, "should be a map dataset"),
        ([Mixture([Rows(0, 3)], [1])], [1], {}, TypeError, "source 0 is a Mixture"),
    ],
)
def test_what_cannot_be_mixed(sources: Any, weights: Any, options: Any, error: type[Exception], text: str) -> None:
    """The error says why."""
    with pytest.raises(error, match=text):
        Mixture(sources, weights, **options)


def test_without_a_seed() -> None:
    """The order of streams follows from the seed."""
    mixture = Mixture([Rows(0, 3)], [1])
    with DataLoader[Any](mixture) as loader, pytest.raises(TypeError, match="give a seed"):
        list(loader)


class Exhausted(Rows):
    """Its sample 2 raises StopIteration."""

    def __getitem__(self, index: int) -> Any:
        return index if index != 2 else next(iter(()))


@pytest.mark.parametrize("workers", ["none", "threads"])
def test_a_sample_that_raises_stop_iteration(workers: str) -> None:
    """Is an error like others; a future of asyncio cannot have this one as its exception."""
    mixture = Mixture([Exhausted(0, 4)], [1], shuffle=False)
    with DataLoader[Any](mixture, batch_size=2, seed=1, **WORKERS[workers]) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(batches)
    with DataLoader[Any](mixture, batch_size=2, seed=1, on_error="skip", **WORKERS[workers]) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [3]]


class ClosedRows(AwaitedRows):
    """Cannot be entered."""

    async def __aenter__(self) -> Any:
        raise OSError("closed today")


def test_a_source_that_cannot_be_entered() -> None:
    """Those that were entered before it are exited."""
    first = AwaitedRows(0, 4)
    with DataLoader[Any](Mixture([first, ClosedRows(0, 4)], [1, 1]), seed=1) as loader:
        with pytest.raises(OSError, match="closed today"):
            list(loader)
        assert not first.entered


def test_a_state_of_other_sources(folder: Path) -> None:
    """The error says which source differs, and in which value."""
    names = COMBINATIONS["stream+map"]
    with loader_of(folder, names) as loader:
        next(iter(loader))
        state = loader.state_dict()
    others: list[tuple[Any, str]] = [
        ([source_of(folder, names[0]), Rows(0, 30)], r"saved with sources\[1\]\.samples=31, but .*\]\.samples=30"),
        ([source_of(folder, "tar"), Rows(0, 31)], r"saved with sources\[0\]\.shuffle_buffer=0"),
        ([RemoteIterableDataset(f"{folder}/a/", streams=2), Rows(0, 31)], r"other shards \(sources\[0\]\.shards\)"),
    ]
    for sources, text in others:
        with DataLoader[Any](Mixture(sources, WEIGHTS), batch_size=GLOBAL, seed=3, decode=decoded) as loader:
            loader.load_state_dict(state)
            with pytest.raises(StateError, match=text):
                list(loader)


def test_weights_for_an_empty_source() -> None:
    """Are refused where they are given, and the run goes on."""
    with DataLoader[Any](Mixture([Rows(0, 3), Rows(9, 0)], [1, 0]), seed=1) as loader:
        assert len(list(loader)) == 3
        with pytest.raises(ValueError, match="dataset 1 is empty"):
            loader.feedback([1, 1])
        assert len(list(loader)) == 3


def test_an_empty_source(folder: Path, tmp_path: Path) -> None:
    """It is named once the samples are counted."""
    (tmp_path / "s.jsonl").write_bytes(b"")
    mixture = Mixture([Rows(0, 3), RemoteIterableDataset(f"{tmp_path}/s.jsonl", streams=1)], [1, 1])
    with DataLoader[Any](mixture, seed=1) as loader, pytest.raises(ValueError, match="dataset 1 is empty"):
        list(loader)
