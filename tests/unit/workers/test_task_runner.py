"""The file that captures a suspected task's standard error is for that task alone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.workers.ipc import wire
from asyncloader.workers.task_runner import TaskRunner


def new_file() -> int:
    return os.open("/dev/null", os.O_WRONLY)


@pytest.mark.parametrize("then", [wire.SUSPECT, wire.RESET])
def test_a_file_without_its_task_is_closed(then: int) -> None:
    """The epoch was given up before the task began: the next epoch's first task is not captured in its place."""
    runner: Any = object.__new__(TaskRunner)
    runner._draw_check = runner._suspect = runner._reader = None
    runner._assignments = SimpleNamespace()
    first, second = new_file(), new_file()
    files = iter([first, second])
    runner.channel = SimpleNamespace(take_fd=lambda: next(files), send_all=lambda _: None)
    runner.control(wire.SUSPECT, b"")
    ((_, body),) = wire.FrameSplitter().feed(wire.pack_reset(wire.RESET, 1))
    runner.control(then, body)
    assert runner._suspect == (second if then == wire.SUSPECT else None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    os.close(second)
