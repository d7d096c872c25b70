"""Scripts that end in every way leave no process, print nothing unexpected, and have the right exit code."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.running import Deaths, run_script, start_script
from tests.pairwise import quickly
from tests.processes import children_of

LIVE = {
    "sync, never asked": """
        batches = iter(DataLoader(data, num_workers=2))
    """,
    "async, loop closed": """
        async def main():
            batches = aiter(AsyncDataLoader(data, num_workers=2))
            await anext(batches)
            return batches
        batches = asyncio.run(main())
    """,
    "async, loop closed, persistent": """
        loader = AsyncDataLoader(data, num_workers=2, persistent_workers=True)
        async def main():
            async for batch in loader:
                break
            return aiter(loader)
        batches = asyncio.run(main())
    """,
    "async, exits inside the loop": """
        async def main():
            async for batch in AsyncDataLoader(data, num_workers=2):
                sys.exit(0)
        asyncio.run(main())
    """,
    "async under uvloop, exits inside the loop": """
        import uvloop
        async def main():
            async for batch in AsyncDataLoader(data, num_workers=2):
                sys.exit(0)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    """,
    "async, cancelled while starting": """
        async def main():
            task = asyncio.ensure_future(anext(aiter(AsyncDataLoader(data, num_workers=2))))
            await asyncio.sleep(0)
        asyncio.run(main())
    """,
    "everything at once": """
        a = DataLoader(data, num_workers=1, persistent_workers=True)
        b = iter(a)
        kept = [next(b) for _ in range(3)]
        c = iter(DataLoader(Slow(), num_workers=1))
        async def main():
            batches = aiter(AsyncDataLoader(data, num_workers=1))
            await anext(batches)
            return batches
        d = asyncio.run(main())
        sys.modules["__main__"].cycle = [kept, b, c, d]
        cycle.append(cycle)
    """,
}

HEAD = """
import asyncio, contextlib, os, signal, sys, threading
import torch
from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed

class AsyncData:
    def __len__(self):
        return 1000
    async def __getitem__(self, index):
        return index

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index > 3:
            signal.pause()  # for ever
        return index

data = torch.arange(1000)
"""


def script(body: str) -> str:
    lines = body.strip("\n").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return HEAD + "\n".join(line[margin:] for line in lines) + "\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", quickly(LIVE, "async, loop closed", "async, exits inside the loop", "everything at once")
)
def test_exit_with_a_live_iterator(name: str, tmp_path: Path) -> None:
    """The interpreter exits with code 0 and without output, and its child processes exit with it. See also
    test_shutdown_provocations.py, whose programs are torch's, too.
    """
    # `subprocess` returns when all processes that hold the pipes have exited: workers too
    done = run_script(tmp_path, script(LIVE[name]))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


INTERRUPTED = {
    "sync, busy body": """
        for batch in DataLoader(data, num_workers=2):
            print("batch", flush=True)
            print("batch", flush=True)
            print("batch", flush=True)
            while True:
                signal.pause()
    """,
    "async, not closed": """
        async def main():
            async for batch in AsyncDataLoader(Slow(), num_workers=2, persistent_workers=True):
                print("batch", flush=True)
        asyncio.run(main())
    """,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c(name: str, tmp_path: Path) -> None:
    """SIGINT to the whole foreground group, as a terminal sends it: one traceback, and all processes exit."""
    source = script("signal.signal(signal.SIGINT, signal.default_int_handler)\n") + script(INTERRUPTED[name])
    with start_script(tmp_path, source) as running:
        for _ in range(3):
            assert running.line() == "batch"
        pid = running.process.pid
        workers = children_of(pid)
        assert len(workers) == 2
        with Deaths(workers) as deaths:
            for process in [*workers, pid]:
                os.kill(process, signal.SIGINT)
            _, errors = running.finish()
            deaths.wait()
    assert running.process.returncode in (-signal.SIGINT, 130)
    tracebacks = re.findall(r"^Traceback|^During handling of the above", errors, re.MULTILINE)
    # asyncio.run makes a cancellation of the interrupt, and raises KeyboardInterrupt itself while it handles that
    chain = ["Traceback", "During handling of the above", "Traceback"]
    assert tracebacks == (chain if name.startswith("async") else ["Traceback"]), errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
