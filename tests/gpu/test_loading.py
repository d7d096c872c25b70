"""Whole epochs onto a card."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions, DeviceUnavailable
from tests.gpu.card import NEEDS_CARD, all_there, on_cpu, settled
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Augmented, Images, Numbers, Sized
from tests.helpers.faulty import Faults, Faulty
from tests.helpers.running import KINDS, collect, run_async, run_loader

pytestmark = NEEDS_CARD

SOME_KIND = pytest.mark.parametrize("kind", KINDS)
WITH_WORKERS = pytest.mark.parametrize("workers", [0, 2])


def first(samples: list[Any]) -> Any:
    return samples[0]


@SOME_KIND
@WITH_WORKERS
@pytest.mark.parametrize("dataset", [Images(41), Augmented(41)], ids=["images", "augmented"])
def test_every_batch_is_right_to_the_bit(kind: str, workers: int, dataset: Any) -> None:
    """They are on the device, in order, with the same random numbers, over three epochs; the consumer keeps all."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "epochs": 3, "shuffle": True}
    expected = run_loader(kind, dataset, **options)
    got = run_loader(kind, dataset, device="cuda", **options)
    assert got.after == expected.after
    for epoch, twin in zip(got.epochs, expected.epochs, strict=True):
        assert all(map(all_there, epoch))
        assert_same([on_cpu(batch) for batch in epoch], twin)


def test_batches_come_straight_from_locked_rings() -> None:
    """No batch is copied in the CPU's memory first; the rings are locked once for all epochs."""
    with DataLoader[Any](Images(40), batch_size=4, num_workers=2, device="cuda", persistent_workers=True) as loader:
        epochs: list[dict[str, float]] = []
        for _ in range(3):
            assert len(list(loader)) == 10
            epochs.append(loader.stats())
        locked = epochs[0]["device/page_locked_bytes"]
        assert locked > 0
        assert epochs[0]["device/page_lock_s"] > 0
        assert [stats["device/page_locked_bytes"] for stats in epochs] == [locked] * 3
        assert [stats["device/staged_batches"] for stats in epochs] == [0] * 3
        assert f"rings of {int(locked):,} bytes, page-locked" in loader.explain()


def test_slots_are_used_again_at_once() -> None:
    """Small rings, many batches, each checked against its index on the device: no slot is written too early."""
    n = 4000
    with DataLoader[Any](Numbers(n, 5000), batch_size=2, num_workers=2, prefetch_factor=1, device="cuda") as loader:
        wrong = torch.zeros((), device="cuda")
        row = torch.arange(5000, dtype=torch.float32, device="cuda")
        for index, batch in enumerate(loader):
            expected = torch.stack([row + (2 * index + place) * 100 for place in range(2)])
            wrong += (batch != expected).sum()
        assert wrong.item() == 0


@SOME_KIND
def test_batches_too_large_for_the_ring(kind: str) -> None:
    """They go through pinned memory, and are right, too."""
    sizes = [1 << 10] * 4 + [1 << 22] * 8 + [100] * 4
    got = collect(kind, Sized(sizes), num_workers=1, device="cuda", collate_fn=first)
    assert [len(batch) for batch in got] == sizes
    assert all(bool((batch == index % 251).all()) for index, batch in enumerate(got))


def to_half(batch: torch.Tensor) -> torch.Tensor:
    return batch.to(torch.float16, memory_format=torch.channels_last).div_(255)


class Bytes(Images):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), index, dtype=torch.uint8)


@WITH_WORKERS
def test_a_transform_on_the_device(workers: int) -> None:
    """The copied batch is uint8; the delivered batch has half precision, channels last."""
    loader = DataLoader[Any](
        Bytes(20),
        batch_size=4,
        num_workers=workers,
        device="cuda",
        device_options=DeviceOptions(device_transform=to_half),
    )
    for batch, plain in zip(loader, DataLoader[Any](Bytes(20), batch_size=4), strict=True):
        assert batch.dtype == torch.float16
        assert batch.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(batch.cpu().float(), plain.float() / 255, atol=1e-3, rtol=0)


def test_a_transform_that_raises_leaves_the_device_alone() -> None:
    """Its own error is raised; an epoch of another loader runs after that."""

    def refuse(batch: Any) -> Any:
        raise KeyError("no label")

    with pytest.raises(KeyError, match="no label"):
        list(
            DataLoader[Any](
                Numbers(20), num_workers=2, device="cuda", device_options=DeviceOptions(device_transform=refuse)
            )
        )
    assert len(list(DataLoader[Any](Numbers(20), num_workers=2, device="cuda"))) == 20


def test_a_transform_sees_what_was_computed_before_the_epoch() -> None:
    """Its stream waits for the consumer's at the epoch's beginning: it reads a constant made there before."""
    torch.cuda._sleep(50_000_000)
    constant = torch.full((3,), 5.0, device="cuda")
    loader = DataLoader[Any](
        Numbers(4),
        num_workers=1,
        device="cuda",
        device_options=DeviceOptions(device_transform=lambda batch: batch * constant),
    )
    for index, batch in enumerate(loader):
        assert batch.tolist() == [[(place + index * 100) * 5.0 for place in range(3)]]


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_memory_is_not_used_again_while_the_consumers_stream_reads_it(side: bool) -> None:
    """Batches are dropped at once, while a slow kernel still delays the kernels that read them."""
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    sums: list[torch.Tensor] = []
    with DataLoader[Any](Numbers(120, 1 << 18), batch_size=2, num_workers=2, device="cuda") as loader:
        with torch.cuda.stream(stream):
            for batch in loader:
                torch.cuda._sleep(3_000_000)
                sums.append(batch[:, 0].sum() + batch[:, -1].sum())
                del batch
        stream.synchronize()
    last = (1 << 18) - 1
    assert [int(each) for each in sums] == [2 * (400 * i + 100) + 2 * last for i in range(60)]


def test_an_async_consumer_on_a_side_stream() -> None:
    """The stream that is current where the batch is taken waits for the copies."""
    stream = torch.cuda.Stream()

    async def sums() -> list[int]:
        async with AsyncDataLoader[Any](Numbers(60, 1 << 16), num_workers=2, device="cuda") as loader:
            with torch.cuda.stream(stream):
                found = [batch[0, 0] * 2 async for batch in loader]
            stream.synchronize()
        return [int(each) for each in found]

    assert run_async(sums()) == [200 * index for index in range(60)]


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_graph_reads_static_batches(mode: str) -> None:
    """The graph is captured with the first batch and replayed with all batches, over two epochs. Torch's default
    mode ("global") is tested, too: it would spoil the capture if other threads called the device in the usual way.
    """
    with DataLoader[Any](
        Numbers(64, 1000),
        batch_size=8,
        num_workers=2,
        device="cuda",
        device_options=DeviceOptions(static_buffers=True),
        persistent_workers=True,
    ) as loader:
        graph: torch.cuda.CUDAGraph | None = None
        result = place = None
        found: list[torch.Tensor] = []
        for _ in range(2):
            for batch in loader:
                if graph is None:
                    place = batch.data_ptr()
                    graph = torch.cuda.CUDAGraph()
                    _ = batch[:, 0] * 2  # a kernel's first launch loads it, which must not happen in a capture
                    # During the capture the loader's threads ask the device for memory and events.
                    with torch.cuda.graph(graph, capture_error_mode=mode):
                        result = batch[:, 0] * 2
                assert batch.data_ptr() == place
                graph.replay()
                assert result is not None
                found.append(result.clone())
        expected = [[200.0 * (8 * index + row) for row in range(8)] for index in range(8)] * 2
        assert [each.tolist() for each in found] == expected
        del graph, result


# ------------------------------------------------------------------------------------------------ lifetimes


@SOME_KIND
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_that_are_left_early(kind: str, persistent: bool) -> None:
    """An epoch is left with copies in flight: nothing is left behind (the leak check looks), and the next begins at
    its beginning.
    """
    options: dict[str, Any] = {"num_workers": 2, "device": "cuda", "device_options": DeviceOptions(device_prefetch=3)}
    counts = [1, 5, 0, 9, 2, 1, 1, 1]

    async def leave() -> None:
        async with AsyncDataLoader[Any](Numbers(40, 1 << 16), persistent_workers=persistent, **options) as loader:
            for count in counts:
                batches: Any = aiter(loader)
                for index in range(count):
                    assert int((await anext(batches))[0, 0]) == 100 * index
                await batches.aclose()

    if kind != "sync":
        run_async(leave(), kind)
        return
    with DataLoader[Any](Numbers(40, 1 << 16), persistent_workers=persistent, **options) as loader:
        for count in counts:
            batches = iter(loader)
            for index in range(count):
                assert int(next(batches)[0, 0]) == 100 * index
            del batches


def test_memory_on_the_device_does_not_grow() -> None:
    """Over many batches of 4 MB the memory of fewer than twenty is in use; afterwards none."""
    before = settled()
    torch.cuda.reset_peak_memory_stats()
    nbytes = 1 << 22
    with DataLoader[Any](Numbers(300, 1 << 20), num_workers=2, device="cuda", persistent_workers=True) as loader:
        for _ in range(2):
            batch = None
            for batch in loader:
                batch.mul_(2)
            del batch
    assert torch.cuda.max_memory_allocated() - before < 20 * nbytes
    del loader
    assert settled() == before


def test_a_consumer_that_keeps_everything() -> None:
    """Batches on the device hold no slot."""
    with DataLoader[Any](Numbers(200, 1 << 14), num_workers=2, device="cuda") as loader:
        kept = list(loader)
        assert loader.stats()["data/ring_copies"] == 0
    assert [int(batch[0, 0]) for batch in kept] == [100 * index for index in range(200)]


@SOME_KIND
@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
def test_a_worker_that_is_killed(kind: str, tmp_path: Path) -> None:
    """The batches are right: its ring is never written again, and stays locked as long as the device reads there."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}

    def run(dataset: Any, **more: Any) -> list[Any]:
        with DataLoader[Any](dataset, seed=11, **options, **more) as loader:
            return list(loader)

    async def run_it(dataset: Any) -> list[Any]:
        async with AsyncDataLoader[Any](dataset, seed=11, device="cuda", **options) as loader:
            return [batch async for batch in loader]

    expected = run(Faulty(60, Faults(tmp_path, {})))
    faulty = Faulty(60, Faults(tmp_path, {5: "SIGKILL", 23: "SIGKILL"}))
    got = run(faulty, device="cuda") if kind == "sync" else run_async(run_it(faulty), kind)
    assert_same([on_cpu(batch) for batch in got], expected)


def test_two_loaders_at_a_time() -> None:
    """Each has its own stream; the batches of both are right."""
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": 1,
        "device": "cuda",
        "device_options": DeviceOptions(device_prefetch=2),
    }
    with DataLoader[Any](Numbers(80), **options) as a, DataLoader[Any](Images(80), **options) as b:
        pairs = list(zip(a, b, strict=True))
    assert_same([on_cpu(pair[0]) for pair in pairs], collect("sync", Numbers(80), batch_size=2))
    assert_same([on_cpu(pair[1]) for pair in pairs], collect("sync", Images(80), batch_size=2))


# ------------------------------------------------------------------------------------------------ devices


def test_a_card_that_is_not_there() -> None:
    """The error names the card, and the number of cards."""
    with pytest.raises(DeviceUnavailable, match="'cuda:99' cannot be used: torch sees"):
        iter(DataLoader[Any](Numbers(3), device="cuda:99"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_another_card_than_the_current_one() -> None:
    """Batches are on the requested card; the thread's current card stays."""
    for batch in DataLoader[Any](Numbers(20), num_workers=2, device="cuda:1"):
        assert batch.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    gc.collect()
