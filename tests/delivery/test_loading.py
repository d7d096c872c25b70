"""Whole epochs with real workers and a fake device: every batch is right, in order, and takes the expected path."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions
from asyncloader.workers.ipc import inline_collate
from tests.delivery.fake import FakeMachine, installed
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Augmented, Images, Numbers, Sized, UnevenStream
from tests.helpers.running import BOTH, KINDS, collect, outcomes, run_async, run_loader
from tests.integration.failures.test_on_error import Rotten, run

SOME_KIND = pytest.mark.parametrize("kind", KINDS)
WITH_WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])


def first(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.thorough
@SOME_KIND
@WITH_WORKERS
def test_every_batch_comes_as_without_a_device(kind: str, workers: int) -> None:
    """Batches have the same types, content and order over three epochs, and the same random numbers are drawn; the
    consumer keeps all batches.
    """
    for dataset in (Images(22), Augmented(22)):
        options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "epochs": 3, "shuffle": True}
        expected = run_loader(kind, dataset, **options)
        with installed() as machine:
            got = run_loader(kind, dataset, device="cpu", **options)
            assert set(machine.device.sources) == ({"ring"} if workers else {"pinned"})
            assert machine.device.followed == 3
            gc.collect()
            assert machine.locked == []  # no batch holds a slot
            assert len(machine.locks) == workers
        assert got.after == expected.after
        for a, b in zip(got.epochs, expected.epochs, strict=True):
            assert_same(a, b)


@SOME_KIND
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_ahead(kind: str, ahead: int) -> None:
    """However many batches may be on the device before they are asked for."""
    expected = collect(kind, Numbers(60), batch_size=3)
    with installed():
        got = collect(
            kind,
            Numbers(60),
            batch_size=3,
            num_workers=2,
            device="cpu",
            device_options=DeviceOptions(device_prefetch=ahead),
        )
    assert_same(got, expected)


@SOME_KIND
@WITH_WORKERS
@pytest.mark.parametrize("dataset", [UnevenStream([5, 9]), AsyncNumbers(20)], ids=["stream", "async"])
def test_other_datasets(kind: str, workers: int, dataset: Any) -> None:
    """Streams and asynchronous datasets."""
    expected = collect(kind, dataset, batch_size=4, num_workers=workers)
    with installed():
        assert_same(collect(kind, dataset, batch_size=4, num_workers=workers, device="cpu"), expected)


@SOME_KIND
@pytest.mark.parametrize("in_order", [True, False])
def test_worker_threads(kind: str, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their batches come by page-locked copies, from memory that is used again only after that; no ring is locked."""
    monkeypatch.setattr(inline_collate, "LARGE", 1)  # every batch lies in such memory
    for dataset in (Numbers(22), AsyncNumbers(20)):
        options: dict[str, Any] = {"batch_size": 3, "num_workers": 2, "in_order": in_order, "workers": "threads"}
        expected = collect(kind, dataset, **options)
        with installed() as machine:
            got = collect(kind, dataset, device="cpu", **options)
            assert set(machine.device.sources) == {"pinned"}
            assert machine.locks == []
        if not in_order:
            got, expected = (sorted(batches, key=repr) for batches in (got, expected))
        assert_same(got, expected)


# -------------------------------------------------------------------------------------------- batch types


@dataclass
class Sequences:
    packed: PackedSequence
    weights: tuple[torch.Tensor, ...]
    names: list[str]


def pack(samples: list[Any]) -> Sequences:
    rows = [sample[: 1 + int(sample[0]) // 100 % 3] for sample in samples]
    return Sequences(pack_sequence(rows, enforce_sorted=False), tuple(samples), [f"{len(row)}" for row in rows])


def empty(samples: list[Any]) -> Any:
    return {"none": torch.empty(0, 3), "text": "x" * len(samples), "some": samples}


def sparse(samples: list[Any]) -> Any:
    return [torch.stack(samples).to_sparse(), {"also": torch.stack(samples)}]


def strings(samples: list[Any]) -> Any:
    return ["ä" * len(samples), {"n": len(samples)}]


@SOME_KIND
@WITH_WORKERS
@pytest.mark.parametrize("collate", [pack, empty, sparse, strings, tuple], ids=lambda function: function.__name__)
def test_batches_of_any_kind(kind: str, workers: int, collate: Any) -> None:
    """Dataclasses, objects that move themselves, sparse and empty tensors, tuples, and batches without any tensor:
    whether they come from a ring or from this process.
    """
    expected = collect("sync", Numbers(11), batch_size=3, collate_fn=collate)
    with installed():
        got = collect(kind, Numbers(11), batch_size=3, num_workers=workers, collate_fn=collate, device="cpu")
    if collate is pack:
        assert [each.names for each in got] == [each.names for each in expected]
        got, expected = (
            [[each.packed.data, each.packed.batch_sizes, each.weights] for each in x] for x in (got, expected)
        )
    assert_same(got, expected)


# ------------------------------------------------------------------------- batches that the ring cannot hold


@SOME_KIND
def test_batches_that_outgrow_the_ring(kind: str) -> None:
    """Oversize batches are copied to page-locked memory first, and counted; the ring that has grown is locked, too."""
    sizes = [1 << 10] * 6 + [1 << 20] * 10
    with installed() as machine:
        batches, _, stats = run(kind, Sized(sizes), num_workers=1, device="cpu", collate_fn=first, prefetch_factor=2)
        device = machine.device
    assert [len(batch) for batch in batches] == sizes
    assert all((batch == index % 251).all() for index, batch in enumerate(batches))
    assert device.sources.count("pinned") == stats["device/staged_batches"] > 0
    assert device.sources.count("ring") == 16 - stats["device/staged_batches"] > 6
    assert len(machine.locks) == 2
    assert stats["device/page_locked_bytes"] == sum(lock.nbytes for lock in machine.locks)
    assert stats["device/page_lock_s"] > 0


def numpy_views(samples: list[Any]) -> Any:
    return {"x": torch.stack(samples), "array": torch.stack(samples).numpy()}


@SOME_KIND
def test_slots_that_the_consumer_holds(kind: str) -> None:
    """Arrays stay views of their slots. A consumer that keeps all of them gets copies once the ring has no slot to
    spare.
    """
    with installed() as machine:
        batches, _, stats = run(kind, Numbers(40), batch_size=2, num_workers=1, device="cpu", collate_fn=numpy_views)
        for index, batch in enumerate(batches):
            assert batch["x"].tolist() == batch["array"].tolist()
            assert batch["x"][:, 0].tolist() == [index * 200, index * 200 + 100]
        assert stats["device/staged_batches"] == stats["data/ring_copies"] > 0
        assert machine.device.sources.count("pinned") == stats["device/staged_batches"]


# ----------------------------------------------------------------------------------- transforms, static tensors


class Halve:
    """A transform that records the threads that call it."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.threads: set[str] = set()

    def __call__(self, batch: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return self.machine.device.after_copies(lambda there: {"half": there.to(torch.float16) / 2})(batch)


@SOME_KIND
@WITH_WORKERS
def test_a_transform(kind: str, workers: int) -> None:
    """Each batch is the transform's result, computed ahead of the consumer and outside of its thread where possible."""
    with installed() as machine:
        halve = Halve(machine)
        got = collect(
            kind,
            Numbers(12),
            batch_size=3,
            num_workers=workers,
            device="cpu",
            device_options=DeviceOptions(device_transform=halve),
        )
    for batch, plain in zip(got, collect("sync", Numbers(12), batch_size=3), strict=True):
        assert torch.equal(batch["half"], plain.to(torch.float16) / 2)
    if workers:
        assert halve.threads == {"asyncloader-device"}
    elif kind != "sync":
        assert threading.current_thread().name not in halve.threads


class RefuseThird:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("no mean")
        return batch


@SOME_KIND
@WITH_WORKERS
def test_a_transform_that_raises(kind: str, workers: int) -> None:
    """Its own error is raised instead of the batch; the batches before were delivered, and nothing is left."""
    with installed():
        found = outcomes(
            kind,
            Numbers(12),
            num_workers=workers,
            device="cpu",
            device_options=DeviceOptions(device_transform=RefuseThird()),
        )
    assert [batch[0][0].item() for batch in found[:2]] == [0, 100]
    assert found[2] == (ZeroDivisionError, "no mean")
    assert all(not isinstance(each, tuple) for each in found[3:])


@SOME_KIND
@WITH_WORKERS
def test_static_batches(kind: str, workers: int) -> None:
    """The addresses stay in the second epoch; the short last batch has its own. Every batch has the right content."""
    seen: list[tuple[int, list[Any]]] = []

    def look(batch: torch.Tensor) -> None:
        seen.append((batch.data_ptr(), batch.tolist()))

    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "persistent_workers": workers > 0}
    with installed():
        if kind == "sync":
            with DataLoader[Any](
                Numbers(10), device="cpu", device_options=DeviceOptions(static_buffers=True), **options
            ) as loader:
                for _ in range(2):
                    for batch in loader:
                        look(batch)
        else:

            async def iterate() -> None:
                async with AsyncDataLoader[Any](
                    Numbers(10), device="cpu", device_options=DeviceOptions(static_buffers=True), **options
                ) as loader:
                    for _ in range(2):
                        async for batch in loader:
                            look(batch)

            run_async(iterate(), kind)
    expected = [batch.tolist() for batch in collect("sync", Numbers(10), batch_size=4)]
    assert [content for _, content in seen] == expected * 2
    addresses = [address for address, _ in seen]
    assert addresses == [addresses[0], addresses[0], addresses[2]] * 2
    assert addresses[0] != addresses[2]


@WITH_WORKERS
def test_without_a_card_transforms_and_static_batches_run_too(workers: int) -> None:
    """The device is the CPU itself, no fake: a program for a card can be tried anywhere."""
    with DataLoader[Any](
        Numbers(8),
        batch_size=2,
        num_workers=workers,
        device="cpu",
        device_options=DeviceOptions(device_transform=torch.neg, static_buffers=True),
    ) as loader:
        seen = [(batch.data_ptr(), batch.tolist()) for batch in loader]
        assert "cpu, where batches are made" in loader.explain()
    assert len({address for address, _ in seen}) == 1
    assert [content for _, content in seen] == [
        (-batch).tolist() for batch in collect("sync", Numbers(8), batch_size=2)
    ]


# ------------------------------------------------------------------------------------------- bad samples


@pytest.mark.parametrize("kind", BOTH)
@WITH_WORKERS
@pytest.mark.parametrize("on_error", ["skip", "refill"])
def test_bad_samples(kind: str, workers: int, on_error: str) -> None:
    """Short and refilled batches are moved to the device like any other."""
    options: dict[str, Any] = {"batch_size": 3, "num_workers": workers, "seed": 3}
    dataset = Rotten(14, {1, 7, 12})
    expected, _, _ = run(kind, dataset, on_error=on_error, **options)
    with installed():
        got, _, _ = run(kind, dataset, on_error=on_error, device="cpu", **options)
    assert [batch["index"].tolist() for batch in got] == [batch["index"].tolist() for batch in expected]
