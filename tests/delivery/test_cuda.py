"""Tests which CUDA calls are made, in which thread and stream, without a GPU."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncloader import DataLoader, DeviceOptions
from asyncloader.delivery import OPENERS
from asyncloader.delivery.cuda import CudaAccelerator
from tests.delivery.fake_cuda import FakeCuda
from tests.delivery.fake_library import REGISTER, FakeLibrary
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.running import KINDS, collect

SECOND = torch.device("cuda", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Copying(CudaAccelerator):
    """Keeps copies in the CPU's memory."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def do_work(accelerator: CudaAccelerator) -> None:
    with accelerator.work():
        event = accelerator.event()
        with accelerator.compute([], event):
            pass
    event.synchronize()


@pytest.mark.parametrize(
    "use",
    [
        do_work,
        CudaAccelerator.sync_side_streams,
        lambda accelerator: accelerator.sync_current_stream([], accelerator.event()),
    ],
    ids=["work", "follow", "hand over"],
)
def test_no_thread_opens_a_context_on_another_device(use: Any, fake: FakeCuda) -> None:
    """A thread that begins on device 0 stands there again afterwards; the only context opened is that of device 1."""
    accelerator = CudaAccelerator(SECOND)
    devices: list[int] = []

    def run() -> None:
        use(accelerator)
        devices.append(fake.device)

    in_thread(run)
    assert fake.contexts == {1}
    assert devices == [0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [None, torch.Tensor.double])
def test_a_whole_loader_stays_on_its_device(
    kind: str, workers: int, transform: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for all threads of the loader, and for the consumer's thread."""
    monkeypatch.setitem(OPENERS, "cuda", Copying)
    got = collect(
        kind,
        Numbers(20),
        batch_size=4,
        num_workers=workers,
        device="cuda:1",
        device_options=DeviceOptions(device_transform=transform),
    )
    expected = collect("sync", Numbers(20), batch_size=4)
    assert_same(got, expected if transform is None else [batch.double() for batch in expected])
    assert fake.contexts == {1}
    assert fake.device == 0


def test_loaders_share_the_streams_of_a_device(fake: FakeCuda) -> None:
    """The streams belong to the process: the driver makes them once per device, outside of torch's pool."""
    first, again, other = (CudaAccelerator(torch.device("cuda", index)) for index in (1, 1, 0))
    streams = [first._kept.copies, first._kept.computations]
    assert [again._kept.copies, again._kept.computations] == streams
    assert len(fake.external) == 4
    assert not {id(other._kept.copies), id(other._kept.computations)} & set(map(id, streams))
    with again.work():
        assert torch.cuda.current_stream() is streams[0]
        with again.compute([], None):
            assert torch.cuda.current_stream() is streams[1]
        assert torch.cuda.current_stream() is streams[0]


def test_a_forked_child_uses_no_stream_of_its_parents(fake: FakeCuda) -> None:
    """`_kept` holds the streams and the events: the child makes its own."""
    mine = CudaAccelerator(SECOND)._kept
    pid = os.fork()
    if pid == 0:
        found = 1
        try:
            found = int(CudaAccelerator(SECOND)._kept is mine)
        finally:
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert CudaAccelerator(SECOND)._kept is mine


def test_the_transforms_stream_waits_for_the_copies_and_no_copy_for_a_transform(fake: FakeCuda) -> None:
    """Each event is recorded in its own stream; both streams wait for earlier work of the consumer's stream."""
    accelerator = CudaAccelerator(SECOND)
    copies: Any = accelerator._kept.copies
    computations: Any = accelerator._kept.computations
    with accelerator.work():
        copied: Any = accelerator.event()
        with accelerator.compute([], copied):
            done: Any = accelerator.event()
    assert (copied.raw.recorded, done.raw.recorded) == (copies, computations)
    assert (copies.waits, computations.waits) == ([], [copied.raw])
    accelerator.sync_side_streams()
    assert len(copies.waits) == 1
    assert copies.waits == computations.waits[1:]
    assert copies.waits[0].recorded is torch.cuda.current_stream(SECOND)


def test_events_are_used_again_and_never_destroyed(fake: FakeCuda) -> None:
    """All loaders of the process share them; an event that may still be waited for is not used again."""
    kept: list[Any] = []
    for _ in range(20):
        accelerator = CudaAccelerator(SECOND)
        with accelerator.work():
            kept = [*kept[-1:], accelerator.event()]
    assert len(fake.events) == 3
    assert len({id(event.raw) for event in kept}) == 2
    del kept
    gc.collect()
    assert len(CudaAccelerator(SECOND)._kept.events) == 3


@pytest.mark.parametrize("library", [{"lockable": 0}, {REGISTER: 801}], ids=["attribute", "code 801"])
def test_where_no_memory_can_be_locked(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches go through page-locked copies. All loaders of the process give one warning; `explain` has the reason."""
    FakeCuda().install(monkeypatch, FakeLibrary(**library))
    monkeypatch.setitem(OPENERS, "cuda", Copying)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with DataLoader[Any](Numbers(20), batch_size=4, num_workers=2, device="cuda:1") as loader:
                for _ in range(2):
                    assert_same(list(loader), collect("sync", Numbers(20), batch_size=4))
                stats = loader.stats()
                assert stats["device/staged_batches"] == 10
                assert stats["device/page_locked_bytes"] == 0
                assert "by way of page-locked copies: " in loader.explain()
                assert "801" in loader.explain() or "HostRegisterSupported is 0" in loader.explain()
    assert ["cannot be page-locked here" in str(each.message) for each in told].count(True) == 1
    assert all(issubclass(each.category, DeprecationWarning) for each in told if each.category is not RuntimeWarning)


def test_code_without_workers_finds_the_callers_device(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset uses the current device: torch's loader would have called it in the consumer's thread."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: fake.device)
    monkeypatch.setattr(torch.accelerator, "set_device_index", fake._set)

    class Asking:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            return fake.device

    with torch.cuda.device(SECOND):
        assert collect("asyncio", Asking(), batch_size=None) == [1, 1]
