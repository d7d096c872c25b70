"""Runs any of the loaders over whole epochs, watches processes, and starts scripts. Nothing here waits by sleeping."""

from __future__ import annotations

import asyncio
import os
import random
import re
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from asyncloader import AsyncDataLoader, DataLoader
from tests import script_server
from tests.helpers.comparing import assert_same
from tests.torch_versions import torch_is

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0  # reached only by a hang
BOTH = ["sync", "asyncio"]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
with suppress(ImportError):  # tests/gpu runs where only torch, numpy and pytest are installed
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop
KINDS = ["sync", *LOOPS]


def run_async(coroutine: Coroutine[Any, Any, T], kind: str = "asyncio") -> T:
    """Like `asyncio.run`, on the loop of this kind, with a time-out for hangs."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await coroutine

    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        return runner.run(bounded())


async def cancelled_after(turns: int, awaitable: Coroutine[Any, Any, Any]) -> None:
    """Start the coroutine, cancel it after a number of turns of the loop, and wait for its end, whatever that is."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# ------------------------------------------------------------------------------------------- whole epochs


def await_our_threads() -> None:
    """Wait until dropped objects have ended by themselves, the loop's thread last: without a call or a collection."""
    for thread in threading.enumerate():
        if thread.name.startswith("asyncloader"):
            thread.join(PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncloader")]


@dataclass
class Run:
    """The result of a run: each epoch's batches, and a number drawn from each global generator afterwards."""

    epochs: list[list[Any]]
    after: tuple[float, float, float]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


def run_loader(kind: str, dataset: Any, *, epochs: int = 1, seed: int = 7, **options: Any) -> Run:
    """Seed everything, make a loader of this kind ("torch" is torch's own) and collect all batches of all epochs.

    An option of type `fresh` is called for its value, so that no loader sees another loader's sampler.
    """
    _seed(seed)
    values = {name: value() if isinstance(value, fresh) else value for name, value in options.items()}
    if kind == "torch":
        torch_loader = torch.utils.data.DataLoader(dataset, **values)
        return Run([list(torch_loader) for _ in range(epochs)], _draws())
    if kind == "sync":
        with DataLoader[Any](dataset, **values) as loader:
            return Run([list(loader) for _ in range(epochs)], _draws())

    async def run() -> list[list[Any]]:
        async with AsyncDataLoader[Any](dataset, **values) as loader:
            return [[batch async for batch in loader] for _ in range(epochs)]

    return Run(run_async(run(), kind), _draws())


class fresh:  # noqa: N801 - reads as a word in a table of options
    """An option's value that is made separately for each loader."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()


def collect(kind: str, dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of an epoch."""
    return run_loader(kind, dataset, **options).epochs[0]


def assert_like_torch(kind: str, dataset: Any, *, twin: Any = None, epochs: int = 1, **options: Any) -> Run:
    """Run torch's loader and ours from the same seeds: batches must be equal, and generators afterwards.

    torch's reads `twin` where it cannot read the dataset itself.
    torch's workers are always forked: the start method does not affect batches, and other methods cost seconds.
    """
    forked: dict[str, Any] = {**options, "multiprocessing_context": None}
    expected = run_loader("torch", dataset if twin is None else twin, epochs=epochs, **forked)
    got = run_loader(kind, dataset, epochs=epochs, **options)
    assert [len(e) for e in got.epochs] == [len(e) for e in expected.epochs]
    for number, (a, b) in enumerate(zip(got.epochs, expected.epochs, strict=True)):
        assert_same(a, b, f"epoch {number}")
    assert got.after == expected.after, "the global generators are elsewhere"
    return got


def _text(error: Exception) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def without_place(text: str) -> str:
    """Return the text of an outcome without our note about the samples: torch's text."""
    lines = text.rstrip("\n").split("\n")
    ours = tuple(f"while {doing} " for doing in ("fetching", "reading", "collating", "calling"))
    while len(lines) > 1 and lines[-1].startswith(ours):
        lines.pop()
    return "\n".join(lines).rstrip("\n")


def outcomes(kind: str, dataset: Any, *, seed: int = 7, seeded: int | None = None, **options: Any) -> list[Any]:
    """Read an epoch, continuing after errors. Returns each batch, or (type, text) of the error in its place.

    `seeded`: the loader's own seed.
    """
    if seeded is not None:
        options["seed"] = seeded
    _seed(seed)
    found: list[Any] = []
    if kind in LOOPS:

        async def run() -> None:
            async with AsyncDataLoader[Any](dataset, **options) as loader:
                batches = aiter(loader)
                while True:
                    try:
                        found.append(await anext(batches))
                    except StopAsyncIteration:
                        return
                    except Exception as error:
                        found.append((type(error), _text(error)))

        run_async(run(), kind)
        return found
    make = torch.utils.data.DataLoader if kind == "torch" else DataLoader
    batches = iter(make(dataset, **options))
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except Exception as error:
            found.append((type(error), _text(error)))


# ------------------------------------------------------------------------------------------- processes


class Deaths:
    """Pidfds of processes that are alive now, to wait for their ends."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.fds = {pid: os.pidfd_open(pid) for pid in pids}

    def wait(self) -> None:
        """Wait until all have ended; fail if a process does not end."""
        try:
            for pid, fd in self.fds.items():
                assert select.select([fd], [], [], PATIENCE_S)[0], f"process {pid} goes on"
        finally:
            self.close()

    def ended(self) -> bool:
        """Whether all have ended already."""
        return all(select.select([fd], [], [], 0)[0] for fd in self.fds.values())

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ------------------------------------------------------------------------------------------- scripts


def environment() -> dict[str, str]:
    """Return the environment of a script: it finds the package, and turns warnings into errors."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    warnings = "error"
    if not torch_is("2.7"):  # its compiler leaves a TemporaryDirectory to the interpreter's exit
        warnings += ",ignore:Implicitly cleaning up:ResourceWarning"
    # Debian's torch contains UCX, which writes a page of text when a process crashes.
    ucx = {"UCX_ERROR_SIGNALS": ""}
    return {**os.environ, **ucx, "PYTHONPATH": path, "PYTHONWARNINGS": warnings, "OMP_NUM_THREADS": "1"}


def without_slow_start(errors: str) -> str:
    """Return a program's errors without the log's line on a slow start, which a busy machine causes."""
    return re.sub(r"^the first batch came after .*\n", "", errors, flags=re.MULTILINE)


def script_file(folder: Path, source: str) -> Path:
    """Write a script to a file, which spawned workers can import."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    return path


def run_script(folder: Path, source: str, *, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, in a fresh interpreter or in a process that has torch imported."""
    command, env = [sys.executable, str(script_file(folder, source))], environment()
    if fresh:
        done = subprocess.run(  # a busy machine imports torch for seconds, once for each process
            command, capture_output=True, text=True, check=False, timeout=3 * PATIENCE_S, env=env, cwd=folder
        )
    else:
        done = script_server.run(command, timeout=PATIENCE_S, env=env, cwd=folder)
    done.stderr = without_slow_start(done.stderr)
    return done


def start_script(folder: Path, source: str, *, fresh: bool = False) -> closing[Script]:
    """Start a script that prints lines and then waits for a signal or a line."""
    return closing(Script(folder, source, fresh=fresh))


class Script:
    """A running script with pipes to it. `close` ends it in every state."""

    def __init__(self, folder: Path, source: str, *, fresh: bool = False) -> None:
        command = [sys.executable, "-u", str(script_file(folder, source))]
        self.process = script_server.start(command, env=environment(), cwd=folder, stdin=subprocess.PIPE, fresh=fresh)

    def line(self) -> str:
        """Return the next line of the script's output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.finish()[1]
        return line.strip()

    def finish(self) -> tuple[str, str]:
        """Wait for the script's end, and for that of all processes that hold its pipes. Returns its output."""
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        return output, without_slow_start(errors)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
