"""A start of workers that is interrupted is undone, and the next start works; a fork during a start does no harm."""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing.context
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.workers import process as worker_process
from tests.helpers.datasets import Numbers
from tests.helpers.forking import fork
from tests.helpers.running import LOOPS, PATIENCE_S
from tests.processes import own_children


def whole(loader: Any) -> bool:
    return [float(batch[0, 0]) for batch in loader] == [100.0 * i for i in range(10)]


def open_files() -> set[tuple[str, str]]:
    """The open descriptors of this process."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            found.add((link.name, str(link.readlink())))
    return found


def sockets() -> set[str]:
    """The open sockets of this process."""
    return {target for _, target in open_files() if target.startswith("socket:")}


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncloader")]


def test_ctrl_c_while_the_loops_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in `Thread.start`, which waits for the thread, leaves no thread or worker; the next `iter` works."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "asyncloader-loop":
            raise KeyboardInterrupt

    loader = DataLoader[Any](Numbers(10), num_workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
    for thread in our_threads():
        thread.join(PATIENCE_S)
    assert not our_threads()
    assert not own_children()
    assert whole(loader)


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a thread: its error is raised, and nothing is left behind."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "asyncloader-loop":
            raise RuntimeError("can't start new thread")
        start(thread)

    loader = DataLoader[Any](Numbers(10), num_workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            iter(loader)
    assert whole(loader)


BORDERS: dict[str, list[tuple[Any, str]]] = {
    "fork": [(os, "fork"), (os, "pipe"), (os, "memfd_create"), (os, "pidfd_open"), (socket, "socketpair")],
    "spawn": [(util, "spawnv_passfds")],
    "forkserver": [(forkserver, "connect_to_new_process"), (forkserver, "read_signed")],
}
"""Functions that a start calls, whose results have to be kept."""


def then_ctrl_c(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; before its caller has the result, a Ctrl-C comes which the system has given to another thread."""
    owner = os.getpid()

    def called(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if os.getpid() == owner:
            _thread.interrupt_main()
        return result

    return called


@pytest.mark.parametrize(
    ("method", "module", "name"),
    [
        pytest.param(method, *border, marks=[pytest.mark.thorough] if method == "spawn" else [])
        for method, borders in BORDERS.items()
        for border in borders
    ],
)
def test_ctrl_c_within_the_start_of_a_worker(method: str, module: Any, name: str, monkeypatch: Any) -> None:
    """The worker that was being started has ended, its descriptors are closed, and the next `iter` begins the epoch."""
    loader = DataLoader[Any](Numbers(10), num_workers=2, multiprocessing_context=method)
    assert whole(loader)  # multiprocessing's helpers run
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, then_ctrl_c(getattr(module, name)))
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert not own_children()
    assert open_files() == before
    assert whole(loader)


@pytest.mark.parametrize("kind", LOOPS)
def test_ctrl_c_within_a_start_in_the_callers_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop raises it once; the same iterator, in the same loop, then begins the epoch."""
    loader = AsyncDataLoader[Any](Numbers(10), num_workers=2, multiprocessing_context="fork")
    batches = aiter(loader)

    async def rest() -> list[float]:
        found = [float(batch[0, 0]) async for batch in batches]
        await loader.aclose()
        return found

    with contextlib.closing(LOOPS[kind]()) as loop:
        before = open_files()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", then_ctrl_c(os.fork))
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(anext(batches))
        assert not own_children()
        assert open_files() == before
        assert loop.run_until_complete(rest()) == [100.0 * i for i in range(10)]


class Gated(multiprocessing.context.ForkContext):
    """The second process stays half constructed until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.half_made = threading.Event()
        self.go_on = threading.Event()

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N802
        self.count += 1
        if self.count == 2:
            self.half_made.set()
            assert self.go_on.wait(PATIENCE_S)
        return multiprocessing.context.ForkProcess(*args, **kwargs)


def test_a_fork_while_another_thread_starts_workers() -> None:
    """The child releases our resources, though a worker is half constructed; the start in the parent continues."""
    context = Gated()
    before = sockets()
    found: list[bool] = []
    loader = DataLoader[Any](Numbers(10), num_workers=2, multiprocessing_context=context)
    thread = threading.Thread(target=lambda: found.append(whole(loader)))
    thread.start()
    assert context.half_made.wait(PATIENCE_S)

    def child() -> None:
        assert not worker_process._processes
        assert len(sockets() - before) <= 1  # the worker's end, on its way to it: no process waits for its closing

    try:
        fork(child).wait()
    finally:
        context.go_on.set()
        thread.join(PATIENCE_S)
    assert found == [True]
