"""A start of workers that is interrupted is undone, and the next start works; a fork during a start does no harm."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.workers import process as worker_process
from tests.helpers.datasets import Numbers
from tests.helpers.forking import fork
from tests.helpers.running import PATIENCE_S
from tests.processes import own_children


def whole(loader: Any) -> bool:
    return [float(batch[0, 0]) for batch in loader] == [100.0 * i for i in range(10)]


def sockets() -> set[str]:
    """The open sockets of this process."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            found.add(str(link.readlink()))
    return {target for target in found if target.startswith("socket:")}


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
