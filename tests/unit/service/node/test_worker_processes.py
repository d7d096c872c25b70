"""Processes of a node that cannot even be started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.service.node.worker_processes import HostProcesses, NotMade


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
    with pytest.raises(NotMade, match=f"data:train: its process cannot be started: {type(error).__name__}"):
        await processes.first_dataset_info()
    await tried.wait()
    await processes.close()
