"""Requirements of frameworks on a DataLoader, point by point: its construction, and its readable attributes.

Points 1 to 9; those about iteration (10 to 15) are in `test_iteration.py`, the rest in
`test_batches.py`. Points 19 to 21 are about `state_dict`, which these loaders do not have.

Each test repeats the actions of the frameworks that its docstring names.
"""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import operator
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate
from torch.utils.data import _DatasetKind as DatasetKind

from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import CountedStream, Images, Numbers, Pids, UnevenStream, collate_strings
from tests.helpers.frameworks import DictCopy, DictCopyOfTorchsType, OneIteratorForAllEpochs, epoch, public
from tests.helpers.running import Deaths, await_our_threads, collect, run_async
from tests.torch_versions import needs_torch

BOTH_CLASSES = pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])


# ------------------------------------------------------------------------------------------- 1


def test_point_01_subclass_of_torchs_loader() -> None:
    """isinstance holds, torch's constructor has run, and the attributes it sets exist (Lightning, Fabric, Composer)."""
    for dataset, kind in [(Numbers(4), DatasetKind.Map), (CountedStream(4, said=4), DatasetKind.Iterable)]:
        loader, theirs = DataLoader[Any](dataset), torch.utils.data.DataLoader(dataset)
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert loader._dataset_kind == kind
        assert loader._iterator is None
        assert vars(loader)["_DataLoader__initialized"] is True
        assert loader._DataLoader__multiprocessing_context is None  # type: ignore[attr-defined]
        assert set(vars(theirs)) <= set(vars(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_point_01_the_guard_of_attributes_is_torchs(workers: int) -> None:
    """A subclass may lower `_DataLoader__initialized` and set read-only attributes (timm's MultiEpochsDataLoader)."""
    loader: Any = OneIteratorForAllEpochs(Numbers(7), batch_size=3, num_workers=workers)
    expected = collect("torch", Numbers(7), batch_size=3)
    for _ in range(3):
        assert_same(list(loader), expected)
    with pytest.raises(ValueError, match="batch_sampler attribute should not be set"):
        loader.batch_sampler = None
    loader.close()


# ------------------------------------------------------------------------------------------- 2


@BOTH_CLASSES
def test_point_02_signature_is_written_out(make: Any) -> None:
    """torch's names, kinds, order and defaults; our options follow by keyword with defaults; no `*args`, `**kwargs`."""
    theirs = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters.values())
    ours = list(inspect.signature(make.__init__).parameters.values())
    facts = [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in ours][: len(facts)] == facts
    assert [p.name for p in ours[len(facts) :]][:2] == ["snapshot_every_n_steps", "seed"]
    for own in ours[len(facts) :]:
        assert own.kind is inspect.Parameter.KEYWORD_ONLY
        assert own.default is not inspect.Parameter.empty
    assert not {p.kind for p in ours} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


# ------------------------------------------------------------------------------------------- 3


class Mebibytes(int):
    """A number that the test recognizes by its identity."""


@BOTH_CLASSES
def test_point_03_own_options_are_the_callers_objects(make: Any) -> None:
    """Each option of ours is an attribute of the same name that holds the very object given (Lightning)."""
    tuning, concurrency = Tuning(ring_bytes="1MiB"), Mebibytes(7)
    loader = make(Numbers(8), num_workers=1, tuning=tuning, concurrency=concurrency)
    assert loader.tuning is tuning
    assert loader.concurrency is concurrency


# ------------------------------------------------------------------------------------------- 4


def test_point_04_no_other_public_attribute() -> None:
    """Before, during and after iteration a loader has torch's public attributes, and those of our options that differ
    from their defaults. The other options can be read, too.
    """
    theirs = inspect.signature(torch.utils.data.DataLoader).parameters
    ours = inspect.signature(DataLoader).parameters
    allowed = public(torch.utils.data.DataLoader(Numbers(6), num_workers=1)) | {"concurrency"}
    loader = DataLoader[Any](Numbers(6), num_workers=1, persistent_workers=True, concurrency=3)
    assert public(loader) == allowed
    for name in ours.keys() - theirs.keys() - {"concurrency"}:
        assert getattr(loader, name) == ours[name].default
    batches = iter(loader)
    next(batches)
    loader.stats()
    loader.explain()
    assert public(loader) == allowed
    list(loader)
    loader.close()
    assert public(loader) == allowed


@pytest.mark.parametrize("workers", [0, 1])
def test_point_04_every_public_attribute_is_an_argument(workers: int) -> None:
    """`type(loader)(**attributes, batch_sampler=...)` works with all of them (Ignite's DeterministicEngine)."""
    old = DataLoader[Any](Numbers(9), batch_size=2, num_workers=workers, concurrency=3, shuffle=True)
    left_out = {"batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"}
    arguments = {name: getattr(old, name) for name in public(old) - left_out}
    new = type(old)(**arguments, batch_sampler=BatchSampler(range(9), batch_size=2, drop_last=False))
    assert new.concurrency == 3
    assert_same(list(new), collect("torch", Numbers(9), batch_size=2))
    list(old)


# ------------------------------------------------------------------------------------------- 5

BASE: dict[str, Any] = {
    "batch_size": 1,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "collate_fn": default_collate,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}


@BOTH_CLASSES
@pytest.mark.parametrize("workers", [{"num_workers": 0, "prefetch_factor": None}, {"num_workers": 2}], ids=str)
def test_point_05_base_values_may_be_given(make: Any, workers: dict[str, Any]) -> None:
    """Writing out every default equals omitting it (HF Trainer, Accelerate), with workers `prefetch_factor=2` too."""
    options = BASE | {"prefetch_factor": 2} | workers
    assert_same(epoch(make(Numbers(5), **options)), collect("torch", Numbers(5)))
    own_batches = BatchSampler(range(5), 2, drop_last=False)
    loader = make(Numbers(5), **(options | {"batch_sampler": own_batches}))
    assert loader.batch_sampler is own_batches
    assert_same(epoch(loader), collect("torch", Numbers(5), batch_size=2))


@BOTH_CLASSES
@pytest.mark.parametrize("workers", [0, 1])
def test_point_05_default_collate_is_known_by_identity(make: Any, workers: int) -> None:
    """Given explicitly, `default_collate` is the default: the attribute is that object, and batches are torch's."""
    for collate_fn in (None, default_collate):
        loader = make(Images(5), batch_size=4, num_workers=workers, collate_fn=collate_fn)
        assert loader.collate_fn is default_collate
        assert_same(epoch(loader), collect("torch", Images(5), batch_size=4))


# ------------------------------------------------------------------------------------------- 6


def test_point_06_default_samplers_are_torchs() -> None:
    """They are SequentialSampler, RandomSampler and BatchSampler, which frameworks look for by type."""
    plain, shuffled = DataLoader[Any](Numbers(6), batch_size=2), DataLoader[Any](Numbers(6), batch_size=2, shuffle=True)
    assert type(plain.sampler) is SequentialSampler
    assert type(shuffled.sampler) is RandomSampler
    for loader in (plain, shuffled):
        assert type(loader.batch_sampler) is BatchSampler
        assert loader.batch_sampler.sampler is loader.sampler
        assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (2, False)
    assert DataLoader[Any](Numbers(6), batch_size=None).batch_sampler is None


class Rotated:
    """An async sampler whose order depends on the epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, number: int) -> None:
        self.epoch = number

    def __len__(self) -> int:
        return self.length

    async def __aiter__(self) -> AsyncIterator[int]:
        for i in range(self.length):
            yield (i + self.epoch) % self.length


@BOTH_CLASSES
@pytest.mark.parametrize("workers", [0, 2])
def test_point_06_an_async_sampler_is_seen_as_a_plain_one(make: Any, workers: int) -> None:
    """`sampler` is the user's object, wrapped by torch's BatchSampler, with its attributes, length and `set_epoch`."""
    sampler = Rotated(7)
    loader = make(Numbers(7), sampler=sampler, batch_size=3, num_workers=workers)
    assert loader.sampler is sampler
    batches = loader.batch_sampler
    assert type(batches) is BatchSampler
    assert (batches.sampler, batches.batch_size, batches.drop_last) == (sampler, 3, False)
    assert len(loader) == len(batches) == 3
    for number in range(3):
        loader.sampler.set_epoch(number)
        order = [(i + number) % 7 for i in range(7)]
        assert_same(epoch(loader), collect("torch", Numbers(7), sampler=order, batch_size=3))


# ------------------------------------------------------------------------------------------- 7


def change_everything(loader: Any) -> Any:
    """Set each option that torch allows to be set after construction to another value."""
    loader.num_workers = 2
    loader.prefetch_factor = 3
    loader.collate_fn = collate_info
    loader.worker_init_fn = mark_worker
    loader.generator = torch.Generator().manual_seed(11)
    loader.multiprocessing_context = multiprocessing.get_context("fork")
    loader.timeout = 20
    return loader


MARKS: list[int] = []


def mark_worker(worker: int) -> None:
    MARKS.append(worker)


def collate_info(samples: list[Any]) -> Any:
    return samples, list(MARKS), float(torch.rand(()))


def test_point_07_options_are_read_at_iter() -> None:
    """Options set after construction hold from the next `iter()` on (Lightning assigns `worker_init_fn`)."""
    first, second = DataLoader[Any](Numbers(8)), torch.utils.data.DataLoader(Numbers(8))
    assert_same(list(first), list(second))
    got, expected = list(change_everything(first)), list(change_everything(second))
    assert_same(got, expected)
    assert {tuple(marks) for _, marks, _ in got} == {(0,), (1,)}


@needs_torch("2.13", "warns that nothing can be pinned")
@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("workers", [0, 1])
def test_point_07_pin_memory_is_read_at_iter(workers: int) -> None:
    """`pin_memory` set after construction is noticed when iteration begins: torch's warning is raised then."""
    for make in (DataLoader, torch.utils.data.DataLoader):
        loader = make(Numbers(3), num_workers=workers)
        loader.pin_memory = True
        with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found"):
            batches = iter(loader)
        assert len(list(batches)) == 3


# ------------------------------------------------------------------------------------------- 8


class Unsized:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter([2, 0, 1])


class UnsizedBatches:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2], [0], [1]])


class UnsizedAsync:
    async def __aiter__(self) -> AsyncIterator[int]:
        for i in (2, 0, 1):
            yield i


UNSIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "stream": (UnevenStream([3]), {}),
    "sampler": (Numbers(3), {"sampler": Unsized()}),
    "batch sampler": (Numbers(3), {"batch_sampler": UnsizedBatches()}),
    "single samples": (Numbers(3), {"sampler": Unsized(), "batch_size": None}),
    "async sampler": (Numbers(3), {"sampler": UnsizedAsync()}),
}


@BOTH_CLASSES
@pytest.mark.parametrize("name", UNSIZED)
def test_point_08_unknown_length_is_a_type_error(make: Any, name: str) -> None:
    """TypeError and no other error: `list()`, progress bars and frameworks take it for "not known"."""
    dataset, options = UNSIZED[name]
    loader = make(dataset, **options)
    with pytest.raises(TypeError):
        len(loader)
    assert operator.length_hint(loader, 17) == 17
    assert len(epoch(loader)) == 3


# ------------------------------------------------------------------------------------------- 9


def copies(loader: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)]


def copies_in_an_epoch(loader: Any) -> list[Any]:
    if not isinstance(loader, AsyncDataLoader):
        batches = iter(loader)
        next(batches)
        return copies(loader)

    async def run() -> list[Any]:
        batches = aiter(loader)
        await anext(batches)
        return copies(loader)

    return run_async(run())


@BOTH_CLASSES
@pytest.mark.parametrize("when", ["new", "in an epoch", "after an epoch"])
def test_point_09_loaders_pickle_and_copy(make: Any, when: str) -> None:
    """Loaders pickle and copy at any time, also with live persistent workers, unlike torch; copies have no iterator."""
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": collate_strings}
    ours: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "tuning": Tuning(ring_bytes=1 << 20)}
    loader = make(Numbers(6), **options, **ours)
    if when == "after an epoch":
        epoch(loader)
    twins = copies_in_an_epoch(loader) if when == "in an epoch" else copies(loader)
    loader.close()
    for twin in twins:
        if isinstance(twin, DataLoader):
            assert twin._iterator is None
        assert (type(twin), twin.batch_size, twin.tuning) == (make, 2, ours["tuning"])
        assert_same(epoch(twin), collect("torch", Numbers(6), **options))
        assert twin.stats()["data/batches"] == 3
        twin.close()


@pytest.mark.parametrize("wrapper", [DictCopy, DictCopyOfTorchsType])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_point_09_the_dict_may_be_copied(wrapper: Any, persistent: bool, used: bool) -> None:
    """A wrapper with the loader's `__dict__` works; the workers end when both wrapper and loader are deleted."""
    loader = DataLoader[Any](Pids(8), num_workers=2, persistent_workers=persistent)
    if used:
        next(iter(loader))
    wrapped = wrapper(loader)
    assert len(wrapped) == 8
    first = {int(pid) for pid in wrapped}
    assert len(first) == 2
    again = {int(pid) for pid in loader}
    assert (first == again) == persistent
    del wrapped
    assert len(list(loader)) == 8  # the wrapper's end does not end the loader
    deaths = Deaths(first if persistent else [])
    del loader
    deaths.wait()
    await_our_threads()  # one of these threads reaps the processes
    assert not multiprocessing.active_children()
