"""torch's contract, row by row: lengths, warnings, worker information, orders. torch's loader runs beside ours."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler, get_worker_info

from asyncloader import DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import CountedStream, Numbers, UnevenStream, identity
from tests.helpers.running import BOTH, run_async, run_loader
from tests.helpers.side_by_side import MAKERS, outcome
from tests.torch_versions import needs_torch, torch_is

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# ------------------------------------------------------------------------------------------- lengths


class NoLength:
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1])


LENGTHS: list[tuple[Any, dict[str, Any]]] = [
    *((Numbers(10), {"batch_size": size, "drop_last": drop}) for size in (1, 3, 10, 11) for drop in (False, True)),
    (Numbers(10), {"batch_size": None}),
    (Numbers(10), {"batch_size": None, "sampler": [1, 2]}),
    (Numbers(10), {"batch_size": 2, "sampler": [1, 2, 3]}),
    (Numbers(10), {"batch_size": 2, "sampler": NoLength()}),
    (Numbers(10), {"batch_size": None, "sampler": NoLength()}),
    (Numbers(10), {"batch_sampler": [[1], [2], [3]]}),
    (Numbers(10), {"batch_sampler": NoLength()}),
    (Numbers(10), {"batch_sampler": BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)}),
    (Numbers(0), {}),
    *((CountedStream(1, said=10), {"batch_size": size, "drop_last": drop}) for size in (3, 5) for drop in (0, 1)),
    (CountedStream(1, said=10), {"batch_size": None}),
]


@pytest.mark.thorough
def test_lengths() -> None:
    """`len` of loader and iterator is torch's number, or raises torch's error."""
    for dataset, given in LENGTHS:
        options: dict[str, Any] = {**given, "drop_last": bool(given.get("drop_last", False))}
        loaders = [make(dataset, **options) for make in MAKERS.values()]
        expected = outcome(len, loaders[0])
        assert [outcome(len, loader) for loader in loaders[1:]] == [expected] * 2, options
        for workers in (0, 1) if "sampler" in options else (0,):
            iterators = [iter(make(dataset, num_workers=workers, **options)) for make in (MAKERS["torch"], DataLoader)]
            assert outcome(len, iterators[1]) == outcome(len, iterators[0]), options
        if isinstance(dataset, IterableDataset):
            assert [loader._IterableDataset_len_called for loader in loaders[:2]] == [10, 10]


class Overlong(CountedStream):
    def __repr__(self) -> str:
        return f"Overlong({self.n}, {self.said})"


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("batch_size", "persistent"), [(None, True), (1, False), (2, True)])
def test_over_length_warnings(kind: str, workers: int, batch_size: int | None, persistent: bool) -> None:
    """Each `next` past the length that `len(loader)` read warns with torch's whole text, again in each epoch; all
    batches are delivered.
    """

    def run(name: str) -> Any:
        told: list[Any] = []
        loader = MAKERS[name](
            Overlong(6, said=2),
            batch_size=batch_size,
            num_workers=workers,
            persistent_workers=persistent and bool(workers),
        )

        async def epochs() -> None:
            for step in range(3):
                length = len(loader) if step else None
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    batches = [batch async for batch in loader] if name == "asyncio" else list(loader)
                told.append((length, batches, [str(w.message) for w in caught if w.category is UserWarning]))
            if name == "asyncio":
                await loader.aclose()

        run_async(epochs())
        return told

    expected = run("torch")
    assert_same(run(kind), expected)
    assert [len(texts) for _, _, texts in expected] == [0] + [4 if batch_size != 2 else 1] * 2


@pytest.mark.parametrize(
    "make",
    [
        DataLoader,
        pytest.param(torch.utils.data.DataLoader, marks=needs_torch("2.13", "names the line, not its own module")),
    ],
    ids=["ours", "torch's"],
)
def test_over_length_warning_points_at_the_users_line(make: Any) -> None:
    """The warning is attributed to the line that requested the batch, as in torch."""
    for workers in (0, 1):
        loader: Any = make(Overlong(3, said=1), num_workers=workers)
        len(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            for _ in loader:
                pass
        assert [w.filename for w in caught] == [__file__] * 2


# ------------------------------------------------------------------------------------------- workers and seeds


INFORMATION = ("id", "num_workers", "seed", "rng", "worker_method")


class Informed(Dataset[Any]):
    """All fields of the worker information, and the result of an assignment to each."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        values = {name: getattr(info, name) for name in INFORMATION if hasattr(info, name)}
        refused = [outcome(setattr, info, name, 5) for name in (*values, "dataset")]
        if dataclasses.is_dataclass(type(info)):
            refused.append(outcome(delattr, info, "id")[:1])
        return type(info).__qualname__, values, refused, hasattr(info, "__dict__"), type(info.dataset) is Informed


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "method"), [("sync", "fork"), ("asyncio", "fork"), ("sync", "spawn")])
def test_worker_info_is_torchs(kind: str, method: str) -> None:
    """All fields have torch's values, and the type is torch's, which refuses assignments."""
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": identity}
    expected = run_loader("torch", Informed(), **options)
    got = run_loader(kind, Informed(), multiprocessing_context=method, **options)
    assert_same(got.epochs, expected.epochs)
    kind_name, values, refused, *_ = got.epochs[0][0][0]
    assert kind_name == "WorkerInfo"
    if torch_is("2.13"):  # a frozen dataclass
        assert set(values) == set(INFORMATION)
        assert all(issubclass(error, AttributeError) for error, *_ in refused)
    else:
        assert set(values) == {"id", "num_workers", "seed"}
        assert [error for error, _ in refused] == [RuntimeError] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_draws_from_the_generator(shuffle: bool, workers: int, persistent: bool) -> None:
    """The generator moves where torch's moves: with each `iter()`, and not for the seed of persistent workers."""
    if persistent and not workers:
        return

    def states(make: Any) -> list[bytes]:
        generator = torch.Generator().manual_seed(4)
        loader = make(
            Numbers(4), shuffle=shuffle, num_workers=workers, generator=generator, persistent_workers=persistent
        )
        found = [bytes(generator.get_state())]
        for _ in range(3):
            batches = iter(loader)
            found.append(bytes(generator.get_state()))
            next(batches)
            found.append(bytes(generator.get_state()))
            list(batches)
            found.append(bytes(generator.get_state()))
        return found

    expected = states(torch.utils.data.DataLoader)
    assert states(DataLoader) == expected
    if not shuffle:
        assert len(set(expected)) == (2 if persistent else 4)


# ------------------------------------------------------------------------------------------- division of work


class Counting(IterableDataset[Any]):
    """Gives the number of times that this copy has been iterated."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        info = get_worker_info()
        return iter([(self.times, -1 if info is None else info.id)] * 3)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_iter_is_called_once_an_epoch(kind: str, workers: int, persistent: bool) -> None:
    """Each worker calls `iter(dataset)` once per epoch; persistent workers call it on the copy that they have."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and bool(workers)}
    options["collate_fn"] = identity
    expected = run_loader("torch", Counting(), epochs=3, **options).epochs
    got = run_loader(kind, Counting(), epochs=3, **options).epochs
    assert_same(got, expected)
    times = [{sample[0] for batch in epoch for sample in batch} for epoch in got]
    assert times == ([{1}, {1}, {1}] if workers and not persistent else [{1}, {2}, {3}])


class Fetchers(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.id


@pytest.mark.thorough
@pytest.mark.parametrize("persistent", [False, True])
def test_round_robin_begins_with_worker_0(persistent: bool) -> None:
    """Worker ``i % num_workers`` makes batch `i` in each epoch, also after an epoch that was left in the middle."""

    def run(make: Any) -> list[list[Any]]:
        loader = make(Fetchers(), num_workers=3, persistent_workers=persistent, collate_fn=identity)
        epochs = [list(loader)]
        for taken in (1, 5, 0):
            batches = iter(loader)
            epochs.append([next(batches) for _ in range(taken)])
            del batches
        return [*epochs, list(loader)]

    got = run(DataLoader)
    assert_same(got, run(torch.utils.data.DataLoader))
    assert got[-1] == [[(i, i % 3)] for i in range(11)]


class Stuck(Fetchers):
    """Index 0 waits for a signal."""

    def __init__(self) -> None:
        self.gate = multiprocessing.Semaphore(0)

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            assert self.gate.acquire(timeout=60)
        return super().__getitem__(index)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_out_of_order_tasks_go_to_who_has_room(factor: int) -> None:
    """in_order=False: a stuck worker holds `prefetch_factor` tasks, the free worker gets the others; as in torch."""

    def run(make: Any) -> list[Any]:
        dataset = Stuck()
        loader = make(dataset, num_workers=2, prefetch_factor=factor, in_order=False, collate_fn=identity)
        batches = iter(loader)
        found = [next(batches) for _ in range(11 - factor)]
        dataset.gate.release()
        return found + list(batches)

    got = run(DataLoader)
    assert got[-factor:] == [[(2 * i, 0)] for i in range(factor)]
    if torch_is("2.13"):  # 2.6 gives the stuck worker every other task, and waits for it
        assert_same(got, run(torch.utils.data.DataLoader))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("lengths", "drop_last"), [([7, 3, 2], True), ([3, 0, 6], True), ([2, 2, 2], True), ([1, 10, 3], False)], ids=str
)
def test_uneven_workers_end_for_themselves(kind: str, drop_last: bool, lengths: list[int]) -> None:
    """A worker's batches are full except its last, which `drop_last` drops; the last worker ends the epoch."""
    options: dict[str, Any] = {"num_workers": 3, "batch_size": 3, "drop_last": drop_last}
    expected = run_loader("torch", UnevenStream(lengths), **options).epochs[0]
    got = run_loader(kind, UnevenStream(lengths), **options).epochs[0]
    for worker, length in enumerate(lengths):
        ours, theirs = ([b for b in batches if int(b[0][0, 0]) == worker] for batches in (got, expected))
        assert_same(ours, theirs)
        sizes = [len(batch[0]) for batch in ours]
        assert sizes == [3] * (length // 3) + [length % 3] * (length % 3 > 0 and not drop_last)
    assert len(got) == len(expected)


# ------------------------------------------------------------------------------------------- iterators


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_refuse_pickling_in_torchs_words(workers: int) -> None:
    """NotImplementedError has torch's arguments, of which the second is the class, also after the first batch."""
    for make in (torch.utils.data.DataLoader, DataLoader):
        batches: Any = iter(make(Numbers(2), num_workers=workers))
        for _ in range(2):
            with pytest.raises(NotImplementedError) as caught:
                pickle.dumps(batches)
            assert caught.value.args == ("{} cannot be pickled", type(batches).__name__)
            next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_profiler_range(workers: int) -> None:
    """Under a profiler each `next`, also the last, is a range `enumerate(DataLoader)#<class>.__next__`."""

    def ranges(make: Any) -> tuple[str, list[str]]:
        batches = iter(make(Numbers(3), num_workers=workers))
        next(batches)  # before the profiler starts
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(batches)
        found = [event.name for event in profile.events() or () if "enumerate(DataLoader)" in event.name]
        return type(batches).__name__, found

    for make in (torch.utils.data.DataLoader, DataLoader):
        name, found = ranges(make)
        assert found == [f"enumerate(DataLoader)#{name}.__next__"] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_are_their_own_iterators(workers: int) -> None:
    """`iter(iterator)` is the iterator; each `iter(loader)` is a new iterator, except with persistent workers."""
    loader = DataLoader[Any](Numbers(3), num_workers=workers)
    batches = iter(loader)
    assert iter(batches) is batches
    assert iter(loader) is not batches
    if workers:
        persistent = DataLoader[Any](Numbers(3), num_workers=workers, persistent_workers=True)
        assert iter(persistent) is iter(persistent) is persistent._iterator
