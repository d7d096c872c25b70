"""Lifetime of page locks and resources: over epochs, several loaders, resumption, deaths, early ends, failures."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions, LoaderClosed, PageLockError, Tuning
from tests.delivery.fake import PATIENCE_S, FakeMachine, installed
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.faulty import Faults, Faulty
from tests.helpers.running import BOTH, KINDS, run_async
from tests.integration.reporting.test_statistics_and_names import LOADERS, exhaust

SOME_KIND = pytest.mark.parametrize("kind", KINDS)


def unlocked(machine: FakeMachine) -> bool:
    """Whether each lock was undone once, while its memory was still mapped."""
    gc.collect()
    return not machine.locked and machine.trouble == []


def some(kind: str, counts: list[int], dataset: Any, **options: Any) -> list[list[Any]]:
    """Read the epochs of one loader, each up to its number of batches in `counts` (-1: to its end)."""
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            read = []
            for count in counts:
                batches: Any = iter(loader)
                read.append(_some(batches, count))
                # as `aclose` below: if these workers ended later, the next would get other rings
                batches._shutdown_workers()
            return read

    async def iterate() -> list[list[Any]]:
        epochs = []
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            for count in counts:
                epoch: list[Any] = []
                batches = aiter(loader)
                while len(epoch) != count:
                    try:
                        epoch.append(await anext(batches))
                    except StopAsyncIteration:
                        break
                epochs.append(epoch)
                await batches.aclose()
        return epochs

    return run_async(iterate(), kind)


def _some(batches: Iterator[Any], count: int) -> list[Any]:
    epoch: list[Any] = []
    while len(epoch) != count:
        try:
            epoch.append(next(batches))
        except StopIteration:
            break
    return epoch


# ------------------------------------------------------------------------------------------------- locks


def growing(samples: list[Any]) -> Any:
    return samples[0].repeat(1 if samples[0][0] < 500 else 1 << 16)


@SOME_KIND
def test_a_grown_ring_replaces_one(kind: str) -> None:
    """The old ring is unlocked once no batch refers to it, while the epoch goes on."""
    with installed() as machine:
        loader = DataLoader[Any](Numbers(30), num_workers=1, device="cpu", collate_fn=growing)
        batches: Any = iter(loader) if kind == "sync" else None
        if batches is not None:
            seen = [len(next(batches)) for _ in range(28)]
            gc.collect()
            assert [lock.undone for lock in machine.locks] == [1, 0]
            loader.close()
        else:
            (epoch,) = some(kind, [-1], Numbers(30), num_workers=1, device="cpu", collate_fn=growing)
            seen = [len(batch) for batch in epoch[:28]]
            assert len(machine.locks) == 2
        assert seen == [3] * 5 + [3 << 16] * 23
        assert unlocked(machine)


@SOME_KIND
def test_a_lock_that_is_refused(kind: str) -> None:
    """PageLockError is raised in place of the first batch; no process, thread or lock is left (the leak check
    looks), and the next epoch fails in the same way.
    """
    refusal = PageLockError(1 << 20, 65536, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
    with installed(refusal=refusal) as machine:
        for persistent in (False, True):
            options: dict[str, Any] = {"num_workers": 2, "device": "cpu", "persistent_workers": persistent}
            with pytest.raises(PageLockError, match="CUDA_ERROR_OUT_OF_MEMORY"):
                some(kind, [-1], Numbers(20), **options)
        assert machine.locks == []
        machine.refusal = None
        (epoch,) = some(kind, [-1], Numbers(5), num_workers=2, device="cpu")
        assert len(epoch) == 5


# -------------------------------------------------------------------------------------------- early ends


@pytest.mark.thorough
@SOME_KIND
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_epochs_that_are_left_early(kind: str, persistent: bool, in_order: bool) -> None:
    """An epoch is left with copies in flight: nothing is left behind, and the next epoch begins at its beginning."""
    counts = [1, 5, 0, 2, 9, 1, 1, -1]
    with installed() as machine:
        epochs = some(
            kind,
            counts,
            Numbers(40),
            batch_size=2,
            num_workers=2,
            device="cpu",
            device_options=DeviceOptions(device_prefetch=3),
            persistent_workers=persistent,
            in_order=in_order,
        )
        assert [len(epoch) for epoch in epochs] == [*counts[:-1], 20]
        if in_order:
            for epoch in epochs:
                assert [int(batch[0][0]) for batch in epoch] == [200 * number for number in range(len(epoch))]
        assert unlocked(machine)


@pytest.mark.parametrize("kind", BOTH)
def test_an_iterator_that_is_dropped(kind: str) -> None:
    """It was not closed, and stands in a reference cycle with its own batches: after a collection nothing is left."""

    def drop_one() -> None:
        loader = DataLoader[Any](
            Numbers(40), batch_size=2, num_workers=2, device="cpu", device_options=DeviceOptions(device_prefetch=2)
        )
        circle: list[Any] = [iter(loader)]
        circle.append((circle, next(circle[0])))

    async def drop_another() -> None:
        loader = AsyncDataLoader[Any](
            Numbers(40), batch_size=2, num_workers=2, device="cpu", device_options=DeviceOptions(device_prefetch=2)
        )
        circle: list[Any] = [aiter(loader)]
        circle.append((circle, await anext(circle[0])))
        del loader, circle
        gc.collect()
        await asyncio.sleep(0)

    with installed() as machine:
        for _ in range(3):
            if kind == "sync":
                drop_one()
                gc.collect()
            else:
                run_async(drop_another())
        assert all(lock.gone.wait(PATIENCE_S) for lock in machine.locks)  # the workers are ended by a thread
        assert unlocked(machine)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_cancelled_consumer_loses_no_batch(kind: str) -> None:
    """The next call gets the batch that was on the device already."""

    async def iterate() -> list[int]:
        seen: list[int] = []
        async with AsyncDataLoader[Any](
            Numbers(30), num_workers=2, device="cpu", device_options=DeviceOptions(device_prefetch=2)
        ) as loader:
            batches = aiter(loader)
            while True:
                task: Any = asyncio.ensure_future(anext(batches))
                await asyncio.sleep(0)
                if not task.done():
                    task.cancel()
                try:
                    seen.append(int((await task)[0][0]) // 100)
                except asyncio.CancelledError:
                    try:
                        seen.append(int((await anext(batches))[0][0]) // 100)
                    except StopAsyncIteration:
                        return seen
                except StopAsyncIteration:
                    return seen

    with installed():
        assert run_async(iterate(), kind) == list(range(30))


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
def test_closing_does_not_hold_up_the_loop(kind: str, persistent: bool, cancelled: bool) -> None:
    """The loop runs while a batch in hand takes its time. The next closing finishes a cancelled closing."""
    begun, go, calls, let_go = threading.Event(), threading.Event(), itertools.count(), list[bool]()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            begun.set()
            let_go.append(go.wait(PATIENCE_S))
        return batch

    async def run() -> list[int]:
        async with AsyncDataLoader[Any](
            Numbers(40),
            num_workers=2,
            device="cpu",
            device_options=DeviceOptions(device_transform=transform),
            persistent_workers=persistent,
        ) as loader:
            batches: Any = aiter(loader)
            await anext(batches)
            assert await asyncio.to_thread(begun.wait, PATIENCE_S)
            closing = asyncio.ensure_future(batches.aclose())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not closing.done()
            with pytest.raises(LoaderClosed):
                await anext(batches)
            if cancelled:
                closing.cancel()
                await asyncio.wait([closing])
                assert closing.cancelled()
                closing = asyncio.ensure_future(batches.aclose())
            asyncio.get_running_loop().call_soon(go.set)
            await closing
            return [int(batch[0, 0]) async for batch in loader]

    with installed() as machine:
        assert run_async(run(), kind) == [100 * index for index in range(40)]
        assert let_go == [True]
        assert unlocked(machine)


# -------------------------------------------------------------------------------------- several, and resumed


@SOME_KIND
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 7, 19])
def test_resuming_in_the_middle(kind: str, workers: int, taken: int) -> None:
    """Batches that were on the device and not taken are loaded again: only delivered batches count."""
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": workers,
        "device": "cpu",
        "device_options": DeviceOptions(device_prefetch=4),
    }
    options |= {"shuffle": True, "seed": 5}
    expected = some("sync", [-1], Numbers(40), **{**options, "device": None})[0]

    def go_on(state: Any) -> list[Any]:
        with DataLoader[Any](Numbers(40), **options) as loader:
            loader.load_state_dict(state)
            return list(loader)

    async def stopped() -> tuple[list[Any], Any]:
        async with AsyncDataLoader[Any](Numbers(40), **options) as loader:
            batches = aiter(loader)
            return [await anext(batches) for _ in range(taken)], loader.state_dict()

    with installed():
        if kind == "sync":
            with DataLoader[Any](Numbers(40), **options) as loader:
                batches = iter(loader)
                got, state = [next(batches) for _ in range(taken)], loader.state_dict()
        else:
            got, state = run_async(stopped(), kind)
        assert_same(got + go_on(state), expected)


@SOME_KIND
@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
def test_a_worker_that_is_killed(kind: str, tmp_path: Path) -> None:
    """Its delivered batches are right; those that it owed come from its replacement, whose new ring is locked."""
    options: dict[str, Any] = {"batch_size": 4, "seed": 11, "shuffle": True, "num_workers": 2}
    (expected,) = some("sync", [-1], Faulty(60, Faults(tmp_path, {})), **options)
    faults = Faults(tmp_path, {5: "SIGKILL", 23: "SIGKILL", 41: "SIGKILL"})
    with installed() as machine:
        (got,) = some(
            kind, [-1], Faulty(60, faults), device="cpu", device_options=DeviceOptions(device_prefetch=2), **options
        )
        assert len(machine.locks) > 2
        del machine.device.handed[:]
        assert unlocked(machine)
    assert_same(got, expected)
    assert len(list(tmp_path.iterdir())) == 3


# ------------------------------------------------------------------------------------ statistics and explain


def explained(loader: Any) -> str:
    (line,) = [line for line in loader.explain().splitlines() if line.startswith("device: ")]
    return str(line)


@pytest.mark.parametrize("kind", BOTH)
def test_explain(kind: str) -> None:
    """The device, the number of batches ahead, and the way of the batches: first as planned, then as it turned out."""
    make = LOADERS[kind]
    assert "device:" not in make(Numbers(3)).explain()
    assert "cpu, where batches are made" in explained(make(Numbers(3), device="cpu"))
    with installed("cuda") as machine:
        loader = make(Numbers(20), num_workers=2, device="cuda:1", device_options=DeviceOptions(device_prefetch=3))
        assert explained(loader) == (
            "device: cuda:1, 3 ahead, copied from rings that are page-locked when the first batch comes"
        )
        exhaust(loader)
        nbytes = sum(lock.nbytes for lock in machine.locks)
        assert explained(loader).startswith(
            f"device: cuda:1, 3 ahead, copied from rings of {nbytes:,} bytes, page-locked in 0."
        )
        assert "copied when asked for" in explained(make(Numbers(3), device="cuda"))
        tight = make(Numbers(6, 9000), num_workers=1, device="cuda", tuning=Tuning(ring_bytes=1 << 12))
        exhaust(tight)
        assert "do not fit into rings of this ring_bytes" in explained(tight)
    with installed("cuda", lockable=False):
        loader = make(Numbers(20), num_workers=2, device="cuda")
        exhaust(loader)
        assert "no driver that locks rings" in explained(loader)
