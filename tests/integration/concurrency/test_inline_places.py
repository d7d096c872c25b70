"""Without workers `AsyncDataLoader` calls a blocking dataset in a thread or on the loop: no visible difference."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.epoch import thread_or_loop
from asyncloader.epoch.thread_or_loop import HOLD_SECONDS
from tests.helpers.comparing import assert_same
from tests.helpers.running import collect, outcomes, run_async

LOOPS = ["asyncio", "uvloop"]
MAIN = threading.main_thread()


class Calls(Dataset[Any]):
    """Sample i is the result of a function for i. Records the thread of each call."""

    def __init__(self, function: Callable[[int], Any] = torch.tensor, n: int = 200) -> None:
        self.function = function
        self.n = n
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.threads.append(threading.current_thread())
        return self.function(index)


class Stream(IterableDataset[Any]):
    """A stream of the samples of `Calls`, in order."""

    def __init__(self, function: Callable[[int], Any] = torch.tensor, n: int = 200) -> None:
        self.calls = Calls(function, n)

    def __iter__(self) -> Iterator[Any]:
        return map(self.calls.__getitem__, range(self.calls.n))


def read(dataset: Any, kind: str = "asyncio", **options: Any) -> list[Any]:
    return collect(kind, dataset, **options)


# ------------------------------------------------------------------------------------------------- where


@pytest.mark.parametrize("kind", LOOPS)
def test_cheap_batches_are_made_on_the_loop(kind: str) -> None:
    """The first batch is made in a thread, where it is measured; then nearly all are made in the loop's own thread."""
    dataset = Calls(n=2000)
    assert_same(read(dataset, kind, batch_size=4), read(Calls(n=2000), "torch", batch_size=4))
    assert set(dataset.threads[:4]) != {MAIN}
    assert len(set(dataset.threads[:4])) == 1
    assert dataset.threads.count(MAIN) > 100


@pytest.mark.parametrize("make", [Calls, Stream])
def test_slow_batches_are_made_in_the_thread(make: Any) -> None:
    """A dataset that computes for long does not hold up the loop: it stays in the thread."""

    def spin(index: int) -> int:
        until = time.perf_counter() + 2 * HOLD_SECONDS
        while time.perf_counter() < until:
            pass
        return index

    dataset = make(spin, 40)
    read(dataset, batch_size=4)
    threads = dataset.threads if isinstance(dataset, Calls) else dataset.calls.threads
    assert MAIN not in threads
    assert len(set(threads)) == 1


@pytest.mark.parametrize("kind", LOOPS)
def test_batches_that_wait_are_made_in_the_thread(kind: str) -> None:
    """A wait for the loop itself would never end on the loop. Three milliseconds: uvloop's clock counts whole ones."""

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()

        async def answer(index: int) -> int:
            await asyncio.sleep(3 * HOLD_SECONDS)
            return index

        def ask(index: int) -> int:
            return asyncio.run_coroutine_threadsafe(answer(index), loop).result()

        dataset = Calls(ask, 60)
        got = [int(sample) async for sample in AsyncDataLoader[Any](dataset, batch_size=None)]
        assert MAIN not in dataset.threads
        return got

    assert run_async(run(), kind) == list(range(60))


def test_where_waits_are_not_counted_the_thread_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a count of waits (macOS) a dataset that waits looks like a fast dataset: the thread is kept."""
    monkeypatch.setattr(thread_or_loop, "_OF_THREAD", None)
    dataset = Calls()
    assert len(read(dataset, batch_size=4)) == 50
    assert MAIN not in dataset.threads


def test_a_dataset_that_is_slow_now_and_then_goes_back() -> None:
    """A slow batch on the loop sends the next batches to the thread; the longer it took, the more batches."""

    def now_and_then(index: int) -> int:
        if index % 20 == 19:
            time.sleep(30 * HOLD_SECONDS)  # the sample that takes long
        return index

    dataset = Calls(now_and_then, 200)
    read(dataset, batch_size=None)
    slow = dataset.threads[19::20]
    assert slow.count(MAIN) <= 1
    assert set(dataset.threads[40:]) == {dataset.threads[0]}


def test_epochs_of_few_batches_are_made_on_the_loop_but_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader remembers what the epochs before have shown. The first batch of each, which may take long, is made in
    a thread.
    """
    worked = 0.0

    def make(index: int) -> int:
        nonlocal worked
        worked += 2 * HOLD_SECONDS * (len(dataset.threads) % 3 == 1)
        return index

    # The thread's clock is the dataset's, and no batch seems to wait.
    monkeypatch.setattr(thread_or_loop, "thread_time", lambda: worked)
    monkeypatch.setattr(thread_or_loop, "_waits", lambda: 0)
    dataset = Calls(make, 3)

    async def run() -> None:
        loader = AsyncDataLoader[Any](dataset, batch_size=None)
        for _ in range(8):
            assert [int(batch) async for batch in loader] == [0, 1, 2]

    run_async(run())
    here = [thread is MAIN for thread in dataset.threads]
    assert here[:6] == [False] * 6
    assert here[-3:] == [False, True, True]


class Bound(Dataset[Any]):
    """Reads by a handle that is opened with the first sample, and refuses other threads with sqlite3's text."""

    def __init__(self) -> None:
        self.opened_in: int | None = None

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        here = threading.get_ident()
        if self.opened_in is None:
            self.opened_in = here
        if self.opened_in != here:
            raise sqlite3.ProgrammingError("SQLite objects created in a thread can only be used in that same thread")
        return index


def test_a_handle_that_was_opened_in_the_thread() -> None:
    """It fails with the first batch on the loop; with `concurrency=1` it is used in one thread alone."""
    with pytest.raises(sqlite3.ProgrammingError, match="same thread"):
        read(Bound(), batch_size=4)
    assert len(read(Bound(), batch_size=4, concurrency=1)) == 25


@pytest.mark.parametrize("kind", LOOPS)
def test_the_loop_gets_its_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run while ``async for`` reads batches that are made on the loop."""
    # Every batch looks cheap and free of waits, although the other task makes the thread wait for the GIL.
    monkeypatch.setattr(thread_or_loop, "thread_time", lambda: 0.0)
    monkeypatch.setattr(thread_or_loop, "_waits", lambda: 0)

    async def run() -> tuple[int, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        dataset = Calls(n=20_000)
        task = asyncio.ensure_future(other())
        here = at = 0
        async for _ in AsyncDataLoader[Any](dataset, batch_size=8):
            if dataset.threads[-1] is MAIN:
                here += 1
                at = at or turns
        task.cancel()
        return here, turns - at

    here, turns = run_async(run(), kind)
    assert here > 1200  # a batch that other processes delay sends a few after it to the thread
    assert turns > 10


# --------------------------------------------------------------------------------------------- unnoticed


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("inner", ["runner", "kept"])
def test_a_dataset_may_run_a_loop_of_its_own(kind: str, inner: str) -> None:
    """The dataset finds no running loop, also when it is called on the consumer's loop."""

    async def sample(index: int) -> int:
        await asyncio.sleep(0)
        return index

    kept = asyncio.new_event_loop()

    def run(index: int) -> int:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return asyncio.run(sample(index)) if inner == "runner" else kept.run_until_complete(sample(index))

    dataset = Calls(run, 50)
    assert read(dataset, kind, batch_size=None) == list(range(50))
    kept.close()
    assert MAIN in dataset.threads


VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=-1)


def test_context_variables_are_the_datasets_own() -> None:
    """A variable that the dataset sets keeps its value from batch to batch, in the thread and on the loop; the
    consumer's variables are hidden from the dataset and do not change.
    """
    seen: list[int] = []

    def note(index: int) -> int:
        seen.append(VARIABLE.get())
        VARIABLE.set(index)
        return index

    async def run() -> None:
        VARIABLE.set(1000)
        dataset = Calls(note)
        async for _ in AsyncDataLoader[Any](dataset, batch_size=None):
            assert VARIABLE.get() == 1000
        assert MAIN in dataset.threads

    run_async(run())
    assert seen == list(range(-1, 199))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradient_modes_are_not_the_consumers(mode: Any) -> None:
    """Under `no_grad` and `inference_mode` of the consumer, batches have the same flags wherever they are made."""
    weight = torch.ones((), requires_grad=True)

    async def run() -> list[Any]:
        dataset = Calls(lambda index: weight * index)
        with mode():
            batches = [batch async for batch in AsyncDataLoader[Any](dataset, batch_size=4)]
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert MAIN in dataset.threads
        return batches

    assert {(batch.requires_grad, batch.is_inference()) for batch in run_async(run())} == {(True, False)}


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), lambda: torch.autocast("cpu")])
def test_other_modes_of_the_consumer_keep_the_dataset_in_its_thread(mode: Any) -> None:
    """These modes hold per thread, and would change batches that are made in the consumer's thread."""
    weight = torch.ones(2, 2)

    async def run() -> list[Any]:
        batches = aiter(AsyncDataLoader[Any](Calls(lambda _: (weight @ weight, 1)), batch_size=4))
        with mode():
            return [batch async for batch in batches]

    assert {(a.dtype, b.device.type) for a, b in run_async(run())} == {(torch.float32, "cpu")}


def _raises(error: type[BaseException], index: int) -> int:
    if index >= 100 and index % 4 == 0:
        raise error
    return index


@pytest.mark.parametrize("error", [StopAsyncIteration, asyncio.CancelledError])
def test_errors_that_would_look_like_something_else(error: type[BaseException]) -> None:
    """Such an error is neither the end nor a cancellation: it replaces its batch, and the next batch follows."""
    dataset = Calls(partial(_raises, error))
    got = outcomes("asyncio", dataset, batch_size=10)
    assert [each[0] if isinstance(each, tuple) else int(each[0]) for each in got] == [
        *range(0, 100, 10),
        *[RuntimeError] * 10,
    ]
    assert MAIN in dataset.threads


@pytest.mark.parametrize("kind", ["sync", *LOOPS])
def test_ctrl_c_in_the_datasets_code(kind: str) -> None:
    """The interrupted batch, made on the loop, is made again at the next call, and the later batches follow."""
    struck: list[int] = []

    def strike(index: int) -> int:
        if index >= 100 and not struck and threading.current_thread() is MAIN:
            struck.append(index)
            raise KeyboardInterrupt
        return index

    async def run(batches: Any) -> list[int]:
        got = []
        while True:
            try:
                got.append(int(await anext(batches)))
            except KeyboardInterrupt:
                got.append(-1)
            except StopAsyncIteration:
                return got

    if kind != "sync":
        got = run_async(run(aiter(AsyncDataLoader[Any](Calls(strike), batch_size=None))), kind)
    else:
        batches = iter(DataLoader[Any](Calls(strike), batch_size=None))
        got = [next(batches) for _ in range(100)]
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        got += [-1, *batches]
    (at,) = struck
    assert got == [*range(at), -1, *range(at, 200)]


# ------------------------------------------------------------------------------------------------- drawn


class Drawn(Dataset[Any]):
    """Fast, slow and faulty samples. Fails if two threads read at the same time."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        often = draw.choice([0.0, 0.02, 0.2])
        self.seconds = [HOLD_SECONDS * draw.choice([1, 2]) if draw.random() < often else 0.0 for _ in range(150)]
        self.faults = [draw.random() < 0.05 for _ in range(150)]
        self.inside = threading.Lock()
        self.threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> Any:
        assert self.inside.acquire(blocking=False), "two at a time"
        try:
            self.threads.add(threading.current_thread())
            if self.seconds[index]:
                time.sleep(self.seconds[index])  # slow samples, as drawn
            if self.faults[index]:
                raise ValueError(f"sample {index}")
            return torch.rand(2) + index
        finally:
            self.inside.release()


Outcome = tuple[Any, dict[str, Any]]


def _expected(seed: int, options: dict[str, Any]) -> list[Outcome]:
    torch.manual_seed(seed)
    loader = DataLoader[Any](Drawn(seed), **options)
    batches = iter(loader)
    found: list[Outcome] = []
    while True:
        try:
            outcome = next(batches)
        except StopIteration:
            return [*found, (None, loader.state_dict())]
        except ValueError as error:
            outcome = str(error)
        found.append((outcome, loader.state_dict()))


async def _found(seed: int, options: dict[str, Any]) -> tuple[list[Outcome], set[threading.Thread]]:
    torch.manual_seed(seed)
    draw = random.Random(seed + 1)
    dataset = Drawn(seed)
    found: list[Outcome] = []
    async with AsyncDataLoader[Any](dataset, **options) as loader:
        batches = aiter(loader)
        while True:
            try:
                if draw.random() < 0.7:
                    outcome = await anext(batches)
                else:
                    task = asyncio.ensure_future(anext(batches))
                    for _ in range(draw.randrange(4)):
                        await asyncio.sleep(0)
                    task.cancel()
                    outcome = await task
            except asyncio.CancelledError:
                continue
            except StopAsyncIteration:
                return [*found, (None, loader.state_dict())], dataset.threads
            except ValueError as error:
                outcome = str(error)
            found.append((outcome, loader.state_dict()))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LOOPS)
def test_drawn_epochs_are_those_of_a_for_loop(kind: str) -> None:
    """With fast, slow and faulty samples and cancelled calls, batches, errors and states are those of ``for``, and only
    one thread reads at a time.
    """
    moved = 0
    for seed in range(30):
        options: dict[str, Any] = {"batch_size": 3, "shuffle": True} | ({"seed": seed} if seed % 3 == 0 else {})
        found, threads = run_async(_found(seed, options), kind)
        expected = _expected(seed, options)
        assert_same([outcome for outcome, _ in found], [outcome for outcome, _ in expected])
        assert [state for _, state in found] == [state for _, state in expected]
        moved += len(threads) == 2 and MAIN in threads
    assert moved > 10
