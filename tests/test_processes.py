"""The list of a process's children is right while its threads come and go, and so is the CPU time of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import processes


@pytest.mark.thorough
@pytest.mark.parametrize("lists", [True, False], ids=["the kernel's lists", "by parent"])
def test_children_while_threads_end(lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that another, ended thread started is found every time, and no other process is."""
    if not lists:
        monkeypatch.setattr(Path, "exists", lambda _: False)
    before = set(processes.children_of(os.getpid()))
    begun: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    starter = threading.Thread(target=lambda: begun.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE)))
    starter.start()
    starter.join()
    churning = threading.Thread(target=churn)
    churning.start()
    try:
        for _ in range(100):
            assert set(processes.children_of(os.getpid())) - before == {begun[0].pid}
    finally:
        done.set()
        churning.join()
        begun[0].communicate()
    assert set(processes.children_of(os.getpid())) == before


def test_no_process() -> None:
    """The error is raised instead of an empty list."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(FileNotFoundError):
        processes.children_of(ended.pid)


def test_cpu_seconds() -> None:
    """A child's time counts while it runs, and after it has ended and was waited for."""
    before = processes.cpu_seconds(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-SEc", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = processes.cpu_seconds(os.getpid())
        child.communicate(b"\n")
    assert during - before > 0.1  # it is counted in ticks
    assert during <= processes.cpu_seconds(os.getpid())
    assert processes.cpu_seconds(child.pid) == 0.0
