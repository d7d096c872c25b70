"""A dataset that cannot be built for a while: loaders get its error, and it is built once that is possible."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service, ServiceUnavailable
from asyncloader.service.node import worker_processes
from asyncloader.service.node.admission import Refused
from asyncloader.service.node.worker_host import HostSetup
from asyncloader.service.node.worker_processes import HostProcesses
from asyncloader.service.protocol.handshake import read_opening
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.serving import serving
from tests.stress.wire_inputs import openings

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 1, "num_workers": 2}


def ready(address: str) -> str:
    """Return the node's answer at `/readyz`."""
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read().decode()}"


def refusal(defined: Any, service: Service, **more: Any) -> str:
    """Return the error of a loader that the node refuses."""
    with (
        pytest.raises(ServiceUnavailable) as caught,
        DataLoader[Any](defined, **OPTIONS, **more, workers=service) as loader,
    ):
        list(loader)
    return str(caught.value).splitlines()[-1]


def test_a_disk_that_is_away_while_processes_are_replaced(tmp_path: Path) -> None:
    """Loaders and `/readyz` get the dataset's own error, on one line; when the disk is back, the node recovers."""
    disk = tmp_path / "disk"
    disk.mkdir()
    error = rf"no disk\n\x1b[2J{disk}"
    flags = ["--metrics", "127.0.0.1:0", "--arg", f"root={disk}"]
    with serving(tmp_path, ["on_disk"], *flags, listen=["127.0.0.1:0"]) as node:
        with DataLoader[Any](definitions.on_disk(), **OPTIONS, workers=node.tcp) as loader:
            batches = list(loader)
        assert ready(node.said["metrics"]) == "ready\n"
        disk.rmdir()
        pids = {pid for batch in batches for pid in batch[1].tolist()}
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while error not in (text := ready(node.said["metrics"])):
            pass
        assert text == f"503 tests.service.definitions:on_disk raised OSError: {error}\n"
        assert refusal(definitions.on_disk(), Service(node.tcp, wait=1)).endswith(f"raised OSError: {error}")
        disk.mkdir()
        with DataLoader[Any](definitions.on_disk(), **OPTIONS, workers=node.tcp) as loader:
            assert len(list(loader)) == len(batches)
        assert ready(node.said["metrics"]) == "ready\n"
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert "has no dataset, and tries again in 0.1 s" in log
    assert "definitions:on_disk is made now" in log
    assert "\x1b" not in log
    assert sum("tries again" in line for line in log.splitlines()) <= 12


def test_arguments_of_a_loader_s(tmp_path: Path) -> None:
    """They are tried again like the node's own, also in threads; failures of many leave room for others."""
    with serving(tmp_path, ["on_disk"], "--open", "on_disk", listen=["127.0.0.1:0"], workers=1) as node:
        soon, patient = Service(node.tcp, wait=0.3), Service(node.tcp, wait=PATIENCE_S)
        for number in range(10):  # at most eight are kept at a time
            assert f"{tmp_path}/{number}" in refusal(definitions.on_disk(root=f"{tmp_path}/{number}"), soon)
        defined = definitions.on_disk(root=f"{tmp_path}/late")
        assert "no disk" in refusal(defined, soon)
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(lambda: list(DataLoader[Any](defined, **OPTIONS, workers=patient)))
            (tmp_path / "late").mkdir()
            assert len(reading.result(PATIENCE_S)) == 20
        (tmp_path / "late").rmdir()
        assert "no disk" in refusal(defined, soon, concurrency=2)
        (tmp_path / "late").mkdir()
        with DataLoader[Any](defined, **OPTIONS, concurrency=2, workers=patient) as loader:
            assert len(list(loader)) == 20


async def test_a_connection_begins_with_the_info_of_its_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process compares that info with its own dataset: the node's newest info may be of a later process."""
    host = HostProcesses(HostSetup("tests.service.definitions:on_disk", {"root": str(tmp_path)}), 1)
    host.start()
    asked: list[Any] = []
    monkeypatch.setattr(host, "_ask", lambda made, kind, request, fds: asked.append(request))
    try:
        planned = (await host.dataset_info())._replace(length=7)
        end: Any = lambda sock, number: sock.close()  # noqa: E731
        await host.open(read_opening(openings()[0]), planned, end)
        assert asked[0].info == planned
    finally:
        await host.close()


async def test_a_process_that_never_has_its_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not keep loaders from the other processes; only the first loader waits for it, a bounded time."""
    monkeypatch.setattr(worker_processes, "_ALL_BEGUN_S", 0.1)
    monkeypatch.setattr(worker_processes, "_NONE_READY_S", 0.1)
    setup = HostSetup("tests.service.definitions:slow_for_one", {"mark": str(tmp_path / "mark")})
    for number in (2, 1):
        host = HostProcesses(setup, number)
        host.start()
        try:
            if number == 2:
                assert (await host.dataset_info()).length == 40
                await host.begun()
                monkeypatch.setattr(worker_processes, "_ALL_BEGUN_S", PATIENCE_S)
                await host.begun()
                (tmp_path / "mark").unlink()
            else:
                with pytest.raises(Refused, match="had made the dataset after 0 seconds"):
                    await host.plan(None)  # type: ignore[arg-type]
        finally:
            await host.close()
