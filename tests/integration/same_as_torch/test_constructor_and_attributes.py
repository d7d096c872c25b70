"""torch's contract, row by row: the constructor, and attributes set later. torch's loader runs beside ours."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader, LoaderTimeout
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import CountedStream, Numbers, identity
from tests.helpers.running import BOTH, run_async
from tests.helpers.side_by_side import MAKERS, messages, outcome
from tests.torch_versions import needs_torch, says_the_same

# ------------------------------------------------------------------------------------------- the constructor

VALUES: list[tuple[str, Any]] = [
    ("num_workers", -1),
    ("num_workers", 1),
    ("timeout", -1),
    ("prefetch_factor", -1),
    ("prefetch_factor", 0),
    ("prefetch_factor", 2),
    ("persistent_workers", True),
    ("multiprocessing_context", "fork"),
    ("multiprocessing_context", "teleport"),
    ("multiprocessing_context", 5),
    ("shuffle", True),
    ("shuffle", False),
    ("sampler", [1]),
    ("batch_sampler", [[1]]),
    ("batch_size", 3),
    ("batch_size", None),
    ("batch_size", 0),
    ("batch_size", True),
    ("drop_last", True),
    ("drop_last", "yes"),
]


def constructed(make: Any, dataset: Any, options: dict[str, Any]) -> Any:
    loader = outcome(make, dataset, **options)
    if isinstance(loader, tuple):
        return loader
    names = ("num_workers", "prefetch_factor", "batch_size", "drop_last", "persistent_workers", "timeout")
    kinds = (type(loader.sampler), type(loader.batch_sampler), loader.collate_fn)
    return [*(getattr(loader, name) for name in names), *kinds]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["map", "empty map", "iterable"])
def test_several_faults_at_a_time(kind: str, name: str) -> None:
    """Of up to three arguments that are wrong or do not go together, the first that torch finds is refused."""
    dataset: Any = {"map": Numbers(6), "empty map": Numbers(0), "iterable": CountedStream(6, said=6)}[name]
    seen: set[str] = set()
    for count in (1, 2, 3):
        for chosen in itertools.combinations(VALUES, count):
            options = dict(chosen)
            if len(options) < count:
                continue
            expected = constructed(torch.utils.data.DataLoader, dataset, options)
            got = constructed(MAKERS[kind], dataset, options)
            assert got == expected, options
            if isinstance(expected, tuple):
                seen.add(expected[1])
    assert len(seen) >= {"map": 13, "empty map": 13, "iterable": 15}[name]


@pytest.mark.parametrize("kind", BOTH)
def test_torchs_faults_come_before_ours(kind: str) -> None:
    """Where both torch and we would refuse, torch's error is raised."""
    options: dict[str, Any] = {"seed": -1, "concurrency": 0}
    for fault in ({"num_workers": -1}, {"batch_size": 0}, {"sampler": [1], "shuffle": True}):
        expected = outcome(torch.utils.data.DataLoader, Numbers(3), **fault)
        assert outcome(MAKERS[kind], Numbers(3), **fault, **options) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_multiprocessing_context_is_checked_when_set_later(num_workers: int) -> None:
    """The property refuses the values that the constructor refuses, with the number of workers at that moment."""
    ours, theirs = DataLoader[Any](Numbers(3), num_workers=num_workers), torch.utils.data.DataLoader(Numbers(3))
    theirs.num_workers = num_workers
    for value in ("fork", "teleport", 5, None, multiprocessing.get_context("spawn")):
        expected = outcome(setattr, theirs, "multiprocessing_context", value)
        assert outcome(setattr, ours, "multiprocessing_context", value) == expected
        assert type(ours.multiprocessing_context) is type(theirs.multiprocessing_context)


class Renamed(DataLoader[Any]):
    pass


class TorchRenamed(torch.utils.data.DataLoader[Any]):
    pass


@pytest.mark.parametrize("make", [DataLoader, Renamed, AsyncDataLoader])
def test_read_only_attributes_name_the_class(make: Any) -> None:
    """A refused assignment has torch's text with the name of the class, and leaves the value unchanged."""
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        ours, theirs = make(Numbers(3)), TorchRenamed(Numbers(3))
        before = getattr(ours, name)
        expected = outcome(setattr, theirs, name, 1)
        got = outcome(setattr, ours, name, 1)
        assert expected[1] == f"{name} attribute should not be set after TorchRenamed is initialized"
        assert got == (ValueError, expected[1].replace("TorchRenamed", make.__name__))
        assert getattr(ours, name) is before


def test_subscripted_class() -> None:
    """`DataLoader[T]` is an annotation and a constructor, which makes a `DataLoader` and no other class."""
    for make in MAKERS.values():
        alias = make[int]
        assert typing.get_origin(alias) is make
        assert typing.get_args(alias)[0] is int  # in ours the batches' type follows: Any by default
        assert type(alias([1, 2, 3], batch_size=2)) is make


# ------------------------------------------------------------------------------------------- set later


class Told(Dataset[Any]):
    """Each sample names the worker that fetched it."""

    mark = "nobody"

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return index, self.mark, None
        process = type(multiprocessing.current_process()).__name__
        mine: Any = info.dataset
        return index, mine.mark, (info.id, info.num_workers, info.seed, process)


class CountSamples:
    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), samples[0]


def mark_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    mine: Any = info.dataset
    mine.mark = f"worker {worker}"


SET_LATER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "more workers": ({"num_workers": 1}, {"num_workers": 2}),
    "fewer workers": ({"num_workers": 2}, {"num_workers": 1}),
    "workers at all": ({}, {"num_workers": 2, "prefetch_factor": 1}),
    "no workers any more": ({"num_workers": 2}, {"num_workers": 0}),
    "prefetch_factor": ({"num_workers": 2}, {"prefetch_factor": 4}),
    "collate_fn": ({"num_workers": 2}, {"collate_fn": CountSamples()}),
    "collate_fn without workers": ({}, {"collate_fn": CountSamples()}),
    "worker_init_fn": ({"num_workers": 2}, {"worker_init_fn": mark_dataset}),
    "generator": ({"num_workers": 2}, {"generator": "new"}),
    "multiprocessing_context": ({"num_workers": 1}, {"multiprocessing_context": "spawn"}),
    "in_order, one worker": ({"num_workers": 1}, {"in_order": False}),
}


def set_later(make: Any, options: dict[str, Any], changes: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    loader = make(Told(), batch_size=2, shuffle=True, **{"collate_fn": identity, **options})
    epochs = [list(loader)]
    for name, value in changes.items():
        setattr(loader, name, torch.Generator().manual_seed(8) if value == "new" else value)
    epochs.append(list(loader))
    return epochs, float(torch.rand(()))


class Gathering(AsyncDataLoader[Any]):
    """An async loader for a plain `for`: each epoch runs in an event loop of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        async def gather() -> list[Any]:
            return [batch async for batch in self]

        return iter(run_async(gather()))


@pytest.mark.thorough
@pytest.mark.parametrize("ours", [DataLoader, Gathering])
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent"])
@pytest.mark.parametrize("name", SET_LATER)
def test_attribute_set_later(name: str, persistent: bool, ours: Any) -> None:
    """The change holds from the next `iter()`; persistent workers continue as they were started, as in torch."""
    options, changes = SET_LATER[name]
    if persistent:
        if not options:
            return
        options = {**options, "persistent_workers": True}
    assert_same(set_later(ours, options, changes), set_later(torch.utils.data.DataLoader, options, changes))


def test_workers_switched_off_and_on() -> None:
    """num_workers may be set to 0 and back; a persistent loader then uses its workers again, as in torch."""

    def run(make: Any) -> Any:
        torch.manual_seed(3)
        loader = make(Told(), num_workers=2, persistent_workers=True, collate_fn=identity)
        epochs = []
        for workers in (2, 0, 2):
            loader.num_workers = workers
            epochs.append(list(loader))
        return epochs

    assert_same(run(DataLoader), run(torch.utils.data.DataLoader))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own half-constructed iterator
@pytest.mark.parametrize(("name", "value"), [("num_workers", -1), ("prefetch_factor", -1), ("prefetch_factor", 0)])
def test_bad_values_set_later(name: str, value: int) -> None:
    """Values that the constructor would have refused are found when iteration starts, by torch's assertions."""
    found = []
    for make in (torch.utils.data.DataLoader, DataLoader):
        loader = make(Told(), num_workers=1)
        setattr(loader, name, value)
        found.append(outcome(iter, loader))
    assert found[0][0] is AssertionError
    assert found[1][0] is AssertionError
    assert says_the_same(found[1][1], found[0][1])


class Blocked(Dataset[Any]):
    """The second sample waits for a signal."""

    def __init__(self) -> None:
        self.gate = multiprocessing.Semaphore(0)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            assert self.gate.acquire(timeout=60)
        return index


@pytest.mark.thorough
def test_timeout_set_later() -> None:
    """A timeout set between epochs bounds the waits of the next epoch, with torch's text."""
    for make, kind in ((torch.utils.data.DataLoader, RuntimeError), (DataLoader, LoaderTimeout)):
        dataset = Blocked()
        loader: Any = make(dataset, num_workers=1)
        dataset.gate.release()
        assert len(list(loader)) == 2
        loader.timeout = 0.25
        batches = iter(loader)
        found = outcome(next, batches)
        while not isinstance(found, tuple):  # on a busy machine the first batch may be late, too
            found = outcome(next, batches)
        assert found == (kind, "DataLoader timed out after 0.25 seconds")
        dataset.gate.release()
        del batches
    assert issubclass(LoaderTimeout, RuntimeError)


@pytest.mark.thorough
@needs_torch("2.13", "says at `iter()` that pin_memory_device is ignored, and that nothing can be pinned")
@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("workers", [0, 1])
def test_warnings_about_pinning(workers: int) -> None:
    """Both are given at `iter()` and not before, that on the device first and only with pin_memory; again at each
    `iter()`, except with persistent workers.
    """

    def run(make: Any, **options: Any) -> Any:
        loader = []
        made = messages(
            lambda: loader.append(make(Numbers(2), num_workers=workers, pin_memory_device="cuda:1", **options))
        )
        first, second = messages(lambda: list(loader[0])), messages(lambda: list(loader[0]))
        loader[0].pin_memory = not loader[0].pin_memory
        return made, first, second, messages(lambda: list(loader[0]))

    for pin in (False, True):
        for persistent in {False, bool(workers)}:
            options = {"pin_memory": pin, "persistent_workers": persistent}
            expected = run(torch.utils.data.DataLoader, **options)
            assert run(DataLoader, **options) == expected
            assert expected[0] == []
            assert [text.split(" ")[0] for _, text in expected[1]] == ["pin_memory_device", "'pin_memory'"] * pin


@pytest.mark.thorough
def test_worker_number_warning_comes_again_with_the_workers() -> None:
    """The warning is given in the constructor, and when workers start: at each `iter()`, or once if persistent."""
    many = len(os.sched_getaffinity(0)) + 1

    def run(make: Any, **options: Any) -> Any:
        loader: list[Any] = []
        told = [messages(lambda: loader.append(make(Numbers(1), num_workers=many, **options)))]
        return told + [messages(lambda: list(loader[0])) for _ in range(2)]

    for persistent in (False, True):
        expected = run(torch.utils.data.DataLoader, persistent_workers=persistent)
        assert [len(told) for told in expected] == [1, 1, 0 if persistent else 1]
        assert run(DataLoader, persistent_workers=persistent) == expected
        assert messages(lambda: AsyncDataLoader[Any](Numbers(1), num_workers=many)) == expected[0]
