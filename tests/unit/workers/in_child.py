"""Calls a function in a forked process whose standard error is a pipe to this process."""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

SECONDS = 30.0  # reached only by a child that hangs
FORK = multiprocessing.get_context("fork")


class Ended(NamedTuple):
    """`result` is the function's result; None if the process did not get that far."""

    result: Any
    stderr: bytes
    exitcode: int | None


def _call(function: Callable[..., Any], args: tuple[Any, ...], answer: Connection, stderr: int) -> None:
    os.dup2(stderr, 2)
    os.close(stderr)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as in any other process
    answer.send(function(*args))
    answer.close()


def in_child(function: Callable[..., Any], *args: Any) -> Ended:
    """Call the function in a child process, wait for the process to exit, and report the outcome."""
    ours, theirs = FORK.Pipe(duplex=False)
    read_fd, write_fd = os.pipe()
    process = FORK.Process(target=_call, args=(function, args, theirs, write_fd), daemon=True)
    process.start()
    theirs.close()
    os.close(write_fd)
    written = bytearray()
    try:
        while True:
            assert select.select([read_fd], [], [], SECONDS)[0], f"the child hangs, after {written!r}"
            data = os.read(read_fd, 1 << 16)
            if not data:
                break
            written += data
        try:
            result = ours.recv() if ours.poll(SECONDS) else None
        except EOFError:
            result = None
        process.join(SECONDS)
        return Ended(result, bytes(written), process.exitcode)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        os.close(read_fd)
        ours.close()
