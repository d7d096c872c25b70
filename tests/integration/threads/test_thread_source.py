"""`workers="threads"`: the batches of worker processes, made in threads of this process, without a copy of anything."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader, Recovery, StatefulDataLoader, sample_rng
from asyncloader.errors import NoEffectWarning
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Numbers, WholeBatches
from tests.helpers.running import run_async, run_loader
from tests.helpers.sealed import THREADED, Drawing, Sealed, epoch, same
from tests.helpers.seeded_runs import Stepwise, epochs_of
from tests.torch_versions import needs_torch

KINDS = pytest.mark.parametrize("kind", ["sync", "asyncio", "uvloop"])

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@KINDS
@pytest.mark.parametrize("changes", [{}, {"num_workers": 3}, {"persistent_workers": True}, {"concurrency": 4}])
def test_seeded_samples_draw_what_they_draw_in_processes(kind: str, changes: dict[str, Any]) -> None:
    """Random numbers belong to the sample, by whichever generators it draws, on any number of threads."""
    options: dict[str, Any] = {"seed": 5, "shuffle": True, "batch_size": 4, "num_workers": 2}
    expected = epochs_of(kind, Drawing(), 2, **options)
    got = epochs_of(kind, Drawing(), 2, **{**options, **changes}, workers="threads")
    if "concurrency" in changes:  # in a process, samples that are made concurrently have no global generators
        expected, got = ([[[*batch[:1], *batch[4:]] for batch in epoch] for epoch in run] for run in (expected, got))
    assert_same(got, expected, "threads against processes")


@needs_torch("2.13", "has thread_safe_generator")
def test_torchs_own_function_gives_the_samples_generator() -> None:
    """A transform that calls `torch.thread_safe_generator` draws the same in threads and in processes."""
    dataset = Sealed(lambda _: torch.rand(3, generator=torch.thread_safe_generator()))
    expected = epoch("sync", dataset, seed=2, num_workers=2, multiprocessing_context="fork")
    assert_same(epoch("sync", dataset, seed=2, num_workers=3, workers="threads"), expected, "threads")


@KINDS
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(23), {"batch_size": 4}),
        (Numbers(23), {"batch_size": None}),
        (Numbers(23), {"batch_size": 4, "shuffle": True, "drop_last": True, "persistent_workers": True}),
        (Numbers(9), {"collate_fn": same, "prefetch_factor": 5, "in_order": True}),
        (WholeBatches(23), {"batch_size": 5}),
        (Numbers(0), {}),
    ],
)
def test_order_and_batches_are_torchs(kind: str, dataset: Any, options: dict[str, Any]) -> None:
    """Without a draw, batches, their order and the global generators afterwards are torch's."""
    options = {"num_workers": 2, **options}
    expected = run_loader("torch", dataset, epochs=2, **options)
    got = run_loader(kind, dataset, epochs=2, **options, workers="threads")
    assert_same(got.epochs, expected.epochs, kind)
    assert got.after == expected.after


class Counting(IterableDataset[Any]):
    """Its position is its own attribute."""

    def __init__(self, length: int) -> None:
        self.position, self.length, self.seen = 0, length, list[int]()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        self.position = info.id
        while self.position < self.length:
            self.seen.append(self.position)
            yield self.seen[-1]
            self.position += info.num_workers

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Stepping:
    """Counts on from where its state says."""

    def __init__(self, first: int, step: int) -> None:
        self.at, self.step = first, step

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at >= 30:
            raise StopIteration
        self.at += self.step
        return self.at - self.step

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Steps(IterableDataset[Any]):
    def __iter__(self) -> Stepping:
        info = get_worker_info()
        assert info is not None
        return Stepping(info.id, info.num_workers)


def test_a_stream_with_a_position_is_each_workers_own() -> None:
    """Threads do not share the position of a stream: no sample comes twice, and the consumer's object is untouched."""
    dataset = Counting(30)
    got = [int(each) for batch in epoch("sync", dataset, batch_size=4, **THREADED) for each in batch]
    assert sorted(got) == list(range(30))
    assert (dataset.position, dataset.seen) == (0, [])
    vars(dataset)["lock"] = threading.Lock()
    with pytest.raises(TypeError, match=r"needs a Counting of its own, .* cannot pickle .*lock.* __deepcopy__"):
        epoch("sync", dataset, batch_size=4, **THREADED)


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("first", ["threads", None])
def test_a_state_goes_on_in_threads_or_processes(make: Any, first: str | None) -> None:
    """A stream's state that was saved with one kind of worker is resumed with the other."""
    options: dict[str, Any] = {"batch_size": 3, "num_workers": 2}
    with make(Steps(), workers=first, **options) as loader:
        batches = iter(loader)
        before = [next(batches) for _ in range(3)]
        state = loader.state_dict()
        rest = list(batches)
        del batches
    with make(Steps(), workers=None if first else "threads", **options) as other:
        other.load_state_dict(state)
        assert_same(list(other), rest, "resumed")
    assert len(before) + len(rest) == 10


class Awaited(AsyncNumbers):
    """Its loop is that of the worker that entered it."""

    loops: ClassVar[set[int]] = set()

    async def __aenter__(self) -> Any:
        self.loop = asyncio.get_running_loop()
        Awaited.loops.add(id(self.loop))
        return self

    async def __aexit__(self, *_: object) -> None:
        del self.loop

    async def __getitem__(self, index: int) -> Any:
        assert asyncio.get_running_loop() is self.loop
        info = await asyncio.to_thread(get_worker_info)
        assert info is get_worker_info()
        assert info is not None
        return index, info.id


@KINDS
def test_an_async_dataset_has_a_loop_and_a_copy_in_each_thread(kind: str) -> None:
    """Each worker enters a copy of its own on an event loop of its own, which the consumer's is not."""
    Awaited.loops.clear()
    dataset = Awaited(20)
    got = epoch(kind, dataset, batch_size=2, **THREADED)
    assert [batch[0].tolist() for batch in got] == [[n, n + 1] for n in range(0, 20, 2)]
    assert [batch[1].tolist() for batch in got] == [[n % 2] * 2 for n in range(10)]
    assert len(Awaited.loops) == 2
    assert not hasattr(dataset, "loop")


@KINDS
def test_nothing_is_pickled(kind: str) -> None:
    """Neither the dataset, nor indices, nor batches, nor errors: the samples are the dataset's own objects."""
    made: list[Any] = []

    def sample(index: Any) -> Any:
        if index is unpicklable[2]:
            raise Local("the third")
        made.append(lambda: index)
        return made[-1]

    class Local(Exception):
        pass

    unpicklable = [(lambda: None) for _ in range(4)]
    dataset = Sealed(sample)
    with Stepwise(kind, dataset, sampler=unpicklable, batch_size=1, collate_fn=same, **THREADED) as run:
        run.begin()
        got = run.take(2)
        with pytest.raises(Local, match="the third"):
            run.step()
        got += run.rest()
    assert {id(batch[0]) for batch in got} == {id(each) for each in made}


@pytest.mark.parametrize("first", [{}, {"num_workers": 3, "workers": "threads"}, {"num_workers": 1}])
@pytest.mark.parametrize("then", [{}, {"num_workers": 2, "workers": "threads"}, {"num_workers": 2}])
def test_a_seeded_epoch_goes_on_in_any_place(first: dict[str, Any], then: dict[str, Any]) -> None:
    """In threads, processes or neither, and any number of them: the rest of the epoch, random numbers included."""
    options: dict[str, Any] = {"seed": 9, "shuffle": True, "batch_size": 4}
    dataset = Sealed(lambda index: [index, float(torch.rand((), generator=sample_rng().torch))], 40)
    with DataLoader[Any](dataset, **options, **first, **_forked(first)) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        rest = list(batches)
        del batches
    with DataLoader[Any](dataset, **options, **then, **_forked(then)) as other:
        other.load_state_dict(state)
        assert_same(list(other), rest, f"{first} and then {then}")


def _forked(options: dict[str, Any]) -> dict[str, Any]:
    """The start method for a dataset that does not travel."""
    return {"multiprocessing_context": "fork"} if options and "workers" not in options else {}


@pytest.mark.parametrize("outer", ["threads", "fork"])
@pytest.mark.parametrize("inner", [{}, THREADED])
def test_a_dataset_may_have_a_loader_of_its_own(outer: str, inner: dict[str, Any]) -> None:
    """A loader within a worker gets its own answers of `get_worker_info`, and leaves the worker's as they are."""

    def sample(index: int) -> list[int]:
        outside: Any = get_worker_info()
        with DataLoader[Any](Sealed(number, 4), generator=torch.Generator(), **inner) as loader:
            inside = [int(batch) for batch in loader]
        after: Any = get_worker_info()
        assert (outside.id, outside.num_workers, outside.seed) == (after.id, after.num_workers, after.seed)
        return [index, *(each - (0 if inner else outside.id) for each in inside)]

    def number(index: int) -> int:
        info: Any = get_worker_info()
        return index * 10 + int(info.id)

    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"} if outer == "fork" else THREADED
    with DataLoader[Any](Sealed(sample, 6), collate_fn=same, **options) as loader:
        got = [each for batch in loader for each in batch]
    assert got == [[index, *([0, 11, 20, 31] if inner else [0, 10, 20, 30])] for index in range(6)]


def test_an_error_names_the_thread() -> None:
    """The training process's pid is not named."""

    def fail(index: int) -> int:
        raise KeyError(index)

    with pytest.raises(KeyError) as caught:
        epoch("sync", Sealed(fail), **THREADED)
    assert re.search(r"in worker 0 \(a thread\)$", "\n".join(caught.value.__notes__))


def test_a_batch_is_freed_with_its_last_reference() -> None:
    """Neither the worker nor the loader keeps a delivered batch, or an index."""
    with DataLoader[Any](Sealed(lambda index: {"x": torch.tensor(index)}), collate_fn=same, **THREADED) as loader:
        batches = iter(loader)
        held = [weakref.ref(next(batches)[0]["x"]) for _ in range(10)]
        assert [ref() for ref in held] == [None] * 10
        del batches


def test_large_batches_reuse_their_memory() -> None:
    """Blocks beyond what the allocator keeps are used again once the consumer has dropped them, and not before."""
    with DataLoader[Any](
        Sealed(lambda n: torch.full((9 << 20,), n, dtype=torch.uint8)), batch_size=4, **THREADED
    ) as loader:
        batches = iter(loader)
        held = next(batches)
        addresses = {batch.data_ptr() for batch in batches}
        assert held[:, 0].tolist() == [0, 1, 2, 3]
        assert len(addresses) < 5
        assert held.data_ptr() not in addresses


def test_options_that_make_no_sense_with_threads() -> None:
    """Contradictions are errors; what has no effect is a warning."""
    with pytest.raises(ValueError, match="exclude one another"):
        DataLoader(Numbers(3), multiprocessing_context="fork", **THREADED)
    with pytest.warns(NoEffectWarning, match="workers='threads' does nothing with num_workers=0"):
        assert len(list(DataLoader(Numbers(3), workers="threads"))) == 3
    with pytest.warns(NoEffectWarning, match="worker_memory_limit.*threads have no memory"):
        DataLoader(Numbers(3), recovery=Recovery(worker_memory_limit="1GB"), **THREADED)


def test_the_async_loader_leaves_its_loop_free() -> None:
    """While worker threads fetch, other tasks of the consumer's loop run."""

    def wait_a_little(index: int) -> int:
        threading.Event().wait(0.002)
        return index

    async def run() -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(turn())
        async with AsyncDataLoader[Any](Sealed(wait_a_little), **THREADED) as loader:
            async for _ in loader:
                pass
        task.cancel()
        return turns

    assert run_async(run()) > 24
