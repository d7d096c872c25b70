"""Epochs in the middle of which the trainer forks, and forked children that have a deadline."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.datasets import Sized
from tests.helpers.running import PATIENCE_S, run_async

AT = (0, 3, 11)
"""Steps at which a trainer forks."""


@dataclass
class Here:
    """A moment within an epoch: the objects that a trainer holds."""

    step: int
    batch: Any
    loader: Any
    batches: Any


def at(steps: tuple[int, ...], act: Callable[[Here], object]) -> Callable[[Here], None]:
    """Return a body that calls `act` at these steps."""

    def body(here: Here) -> None:
        if here.step in steps:
            act(here)

    return body


def value(batch: Any) -> int:
    """Return the number that fills the batch; -1 if its numbers differ."""
    found = batch.numpy()  # uses no threads of torch's, which a forked child cannot use
    return int(found.flat[0]) if found.min() == found.max() else -1


def expected(n: int) -> list[int]:
    """Return the values of an epoch."""
    return [i % 251 for i in range(n)]


def epoch(kind: str, body: Callable[[Here], None], *, n: int = 40, nbytes: int = 5000, **options: Any) -> list[int]:
    """Read an epoch with this kind of loader; `body` is called with each batch. Returns the batches' values."""
    dataset = Sized([nbytes] * n)
    options = {"num_workers": 2, "timeout": PATIENCE_S, **options}
    values = []
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            batches = iter(loader)
            for step, batch in enumerate(batches):
                body(Here(step, batch, loader, batches))
                values.append(value(batch))
        return values

    async def run() -> None:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            batches = aiter(loader)
            async for batch in batches:
                body(Here(len(values), batch, loader, batches))
                values.append(value(batch))

    run_async(run(), kind)
    return values


class Child:
    """A child process that is waited for, and killed if it hangs."""

    def __init__(self, pid: int, errors: int) -> None:
        self.pid = pid
        self._errors = errors
        # Becomes readable at the child's end. Where pidfds do not exist (macOS) it is the pipe whose other end the
        # child holds; that pipe also stays open as long as processes that the child forked, which `wait` waits for in
        # any event, to read the child's errors.
        self._end = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else os.dup(errors)

    def wait(self) -> None:
        """Wait until the child has ended. Fails, with the child's error output, if it failed or hangs."""
        ended = bool(select.select([self._end], [], [], PATIENCE_S)[0])
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._end)
        with os.fdopen(self._errors) as stream:
            words = stream.read()
        assert ended, f"the child hangs; {words}"
        assert code == 0, f"exit code {code}; {words}"


def fork(body: Callable[[], object]) -> Child:
    """Fork; the child runs `body` and ends at once, without exit hooks. `Child.wait` reports its exception."""
    errors, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        return Child(pid, errors)
    code = 1
    try:
        os.close(errors)
        body()
        code = 0
    except BaseException:
        os.write(tell, traceback.format_exc()[-4000:].encode())
    finally:
        os._exit(code)
