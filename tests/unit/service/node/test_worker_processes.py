"""Processes of a node that cannot even be started."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.service.node.admission import Refused
from asyncloader.service.node.worker_host import NOT_MADE
from asyncloader.service.node.worker_processes import HostProcesses, _Process
from asyncloader.telemetry.counters import Recorder
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel, channel_pair


@pytest.mark.parametrize(
    "error", [EOFError(), RuntimeError("can't start new thread"), OSError("too many open files")], ids=repr
)
async def test_one_that_cannot_be_forked(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders receive any such error, and another start is tried."""
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()
    attempts: list[int] = []

    def make(self: HostProcesses, number: int) -> Any:
        attempts.append(number)
        if len(attempts) == 2:
            loop.call_soon_threadsafe(tried.set)
        raise error

    monkeypatch.setattr(HostProcesses, "_make", make)
    setup: Any = SimpleNamespace(target="data:train", threads=False)
    processes = HostProcesses(setup, 1)
    processes.start()
    with pytest.raises(Refused, match=f"data:train: its process cannot be started: {type(error).__name__}"):
        await processes.dataset_info()
    await tried.wait()
    await processes.close()


async def test_a_reason_behind_many_log_lines() -> None:
    """Loaders receive the reason of a process that has logged more than one read takes before it exited."""
    ours, theirs = channel_pair()
    line = pickle.dumps((logging.DEBUG, "x" * 30_000, None, None))
    with theirs:
        for _ in range(4):
            theirs.sendall(wire.pack(wire.LOG, line))
        theirs.sendall(wire.pack(NOT_MADE, pickle.dumps("no disk")))
    ended = os.open("/dev/null", os.O_RDONLY)
    process: Any = SimpleNamespace(
        channel=Channel(ours),
        death_fd=ended,
        death=RuntimeError,
        release=ours.close,
        recorder=Recorder(),
        released=True,
    )
    setup: Any = SimpleNamespace(target="data:train", threads=False)
    processes = HostProcesses(setup, 1)
    made = processes._processes[0] = _Process(process)
    processes._died(0, made, 0.0)
    os.close(ended)
    assert processes.problem == "no disk"
    assert processes.deaths == 0
    await processes.close()
