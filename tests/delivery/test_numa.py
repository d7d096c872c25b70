from __future__ import annotations

import ctypes
import os
import platform
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncloader.delivery import cuda
from asyncloader.delivery.device_stage import DeviceStage
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.transfer import DeviceTransfer
from asyncloader.events import Action
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.memory.layout import PAGE
from tests.delivery.answers import deliver, new_ring
from tests.delivery.fake import PATIENCE_S, FakeMachine

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's system calls")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the system's files of a device, and of nodes with cores."""

    def make(device: str, *cores: str) -> None:
        (tmp_path / "pci/0000:3b:00.0").mkdir(parents=True)
        (tmp_path / "pci/0000:3b:00.0/numa_node").write_text(device)
        for node, text in enumerate(cores):
            (tmp_path / f"nodes/node{node}").mkdir(parents=True)
            (tmp_path / f"nodes/node{node}/cpulist").write_text(f"{text}\n")
        monkeypatch.setattr(cuda, "_PCI", tmp_path / "pci")
        monkeypatch.setattr(cuda, "_NODES", tmp_path / "nodes")

    return make


@pytest.mark.parametrize(
    ("device", "nodes", "expected"), [("1\n", 2, 1), ("0\n", 2, 0), ("-1\n", 2, None), ("0\n", 1, None), ("", 2, None)]
)
def test_a_devices_node(device: str, nodes: int, expected: int | None, machine: Callable[..., None]) -> None:
    """It is known where the machine has several nodes and the system names the device's."""
    machine(device, *["0"] * nodes)
    assert cuda.node_of("0000:3B:00.0") == expected
    assert cuda.node_of("0000:99:00.0") is None


@LINUX_ONLY
@pytest.mark.parametrize("cores", ["{one}", "{one}-{one},5000-5003", "5000", "nonsense"])
def test_a_thread_near_the_device(cores: str, machine: Callable[..., None]) -> None:
    """It runs on the node's cores, if it may run on any of them; no other thread is moved."""
    allowed = os.sched_getaffinity(0)
    one = max(allowed)
    machine("1", "0", cores.format(one=one))
    found: list[set[int]] = []

    def run() -> None:
        cuda.stay_near(1)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{one} if "{one}" in cores else allowed]
    assert os.sched_getaffinity(0) == allowed


@LINUX_ONLY
def test_the_stage_works_near_its_device(machine: Callable[..., None]) -> None:
    """The stage's own thread, which touches the batches, is moved; the thread that made the stage is not."""
    allowed = os.sched_getaffinity(0)
    one = max(allowed)
    machine("1", "0", f"{one}")
    found: list[set[int]] = []
    out: queue.SimpleQueue[Action] = queue.SimpleQueue()
    device = FakeMachine().open()
    device.node = 1
    transfer = DeviceTransfer(device, lambda batch: found.append(os.sched_getaffinity(0)), static=False)
    stage = DeviceStage(Opener(Statistics()), transfer, Statistics(), out.put, 1)
    stage.put(deliver(0, new_ring()))
    out.get(timeout=PATIENCE_S)
    stage.close()
    assert found == [{one}]
    assert os.sched_getaffinity(0) == allowed


@LINUX_ONLY
def test_the_pages_of_a_ring_that_is_locked() -> None:
    """They are bound to the node before they are allocated; where the system allows it, the test reads that policy
    back.
    """
    ring = new_ring()
    asked: list[tuple[int, int]] = []

    def lock(address: int, nbytes: int) -> Callable[[], None]:
        asked.append((address, nbytes))
        return lambda: None

    ring.lock_pages(lock, lambda address, nbytes: cuda.prefer_node(address, nbytes, 0))
    ((address, nbytes),) = asked
    assert nbytes == 12 * PAGE
    mode = ctypes.c_int(-1)
    get_mempolicy = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if get_mempolicy is None:
        pytest.skip("another kind of machine")
    by_address = 2
    call = ctypes.CDLL(None, use_errno=True).syscall
    done = call(
        ctypes.c_long(get_mempolicy),
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(by_address),
    )
    if done != 0:
        pytest.skip(f"the system tells no policies: {os.strerror(ctypes.get_errno())}")
    assert mode.value == 1
