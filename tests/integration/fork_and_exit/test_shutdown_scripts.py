"""Programs that exit, or are killed, while their workers are stuck: the right exit code, one traceback, no orphan.

Each program is a process of its own. See also test_nothing_left.py, test_shutdown_provocations.py and
test_shutdown_states.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import PATIENCE_S, Deaths, start_script
from tests.helpers.stuck import STUCK

HEAD = """
import asyncio, os, select, signal, sys, threading
import torch
from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.stuck import get_stuck

class Stuck(torch.utils.data.Dataset):
    def __init__(self, how, index=2):
        self.how = how
        self.index = index
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index >= self.index:
            os.write(1, f"stuck {os.getpid()}\\n".encode())
            get_stuck(self.how)
        return index

class Init:
    def __init__(self, how):
        self.how = how
    def __call__(self, worker):
        os.write(1, f"stuck {os.getpid()}\\n".encode())
        get_stuck(self.how)

class Arrival(Stuck):
    def __setstate__(self, state):
        self.__dict__.update(state)
        os.write(1, f"stuck {os.getpid()}\\n".encode())
        get_stuck(self.how)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""

# Two batches, then both workers are stuck, and the program waits in `next`.
NEXT = {
    "sync": """
    for batch in DataLoader(Stuck(HOW), num_workers=2, multiprocessing_context=METHOD):
        pass
""",
    "async": """
    async def main():
        async for batch in AsyncDataLoader(Stuck(HOW), num_workers=2, multiprocessing_context=METHOD):
            pass
    asyncio.run(main())
""",
}
EXITS = {
    "sync": """
    batches = iter(DataLoader(Stuck(HOW), num_workers=2))
    next(batches), next(batches)
    sys.stdin.readline()
""",
    "sync, in a hook": """
    import atexit
    batches = iter(DataLoader(Stuck(HOW), num_workers=2))
    next(batches), next(batches)
    atexit.register(batches._shutdown_workers)
    sys.stdin.readline()
""",
    "async, the loop is closed": """
    async def main():
        batches = aiter(AsyncDataLoader(Stuck(HOW), num_workers=2))
        await anext(batches), await anext(batches)
        return batches
    batches = asyncio.run(main())
    sys.stdin.readline()
""",
    "async, persistent, the loop is closed": """
    loader = AsyncDataLoader(Stuck(HOW), num_workers=2, persistent_workers=True)
    async def main():
        batches = aiter(loader)
        await anext(batches), await anext(batches)
    asyncio.run(main())
    sys.stdin.readline()
""",
    "async, within the loop": """
    async def main():
        batches = aiter(AsyncDataLoader(Stuck(HOW), num_workers=2))
        await anext(batches), await anext(batches)
        sys.stdin.readline()
        sys.exit(0)
    asyncio.run(main())
""",
    "an error in the body": """
    for batch in DataLoader(Stuck(HOW), num_workers=2):
        if int(batch) == 1:
            sys.stdin.readline()
            raise SystemExit(0)
""",
}
GRANDCHILD = "with a child that holds all descriptors"


def script(body: str, how: str, method: str | None = None) -> str:
    return HEAD + body.replace("HOW", repr(how)).replace("METHOD", repr(method))


class Program:
    """A running script whose workers have reported that they are stuck."""

    def __init__(self, running: Any, workers: int) -> None:
        self.running = running
        self.pid: int = running.process.pid
        self.workers = [int(self.line("stuck")) for _ in range(workers)]

    def line(self, word: str) -> str:
        """The rest of the next line, which must begin with this word."""
        first, _, rest = self.running.line().partition(" ")
        assert first == word
        return str(rest)

    def go_on(self) -> None:
        """Let the script return from its ``readline``."""
        self.running.process.stdin.write("\n")
        self.running.process.stdin.flush()

    def ends(self) -> tuple[int, str]:
        """Wait until the script and all other holders of its pipes have exited; its exit code and standard error."""
        self.running.process.wait(PATIENCE_S)
        _, errors = self.running.finish()
        return self.running.process.returncode, errors


@contextlib.contextmanager
def program(folder: Path, source: str, *, fresh: bool = False) -> Generator[Program]:
    """Run a script with two workers; at the end, whatever happened, neither it nor its workers are alive."""
    with start_script(folder, source, fresh=fresh) as running:
        found = Program(running, 2)
        try:
            yield found
        finally:
            for pid in found.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def tracebacks(errors: str) -> list[str]:
    return re.findall(r"^Traceback|^During handling of the above", errors, re.MULTILINE)


# ------------------------------------------------------------------------------------------- Ctrl-C


def assert_interrupted(kind: str, code: int, errors: str) -> None:
    """Check that the program ended like Python on Ctrl-C: its exit code, and one traceback."""
    assert code in (-signal.SIGINT, 130)
    # asyncio.run makes a cancellation of the interrupt, and raises KeyboardInterrupt itself while it handles that
    chain = ["Traceback", "During handling of the above", "Traceback"]
    assert tracebacks(errors) == (["Traceback"] if kind == "sync" else chain), errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["deaf to SIGTERM", "in C with the GIL, deaf to SIGTERM", "stopped"])
@pytest.mark.parametrize("kind", NEXT)
def test_ctrl_c_in_next(kind: str, how: str, tmp_path: Path) -> None:
    """The workers end, although they are stuck, before the program does."""
    with program(tmp_path, script(NEXT[kind], how), fresh=True) as found, Deaths(found.workers) as deaths:
        os.kill(found.pid, signal.SIGINT)
        code, errors = found.ends()
        assert deaths.ended()
    assert_interrupted(kind, code, errors)


STARTING = {
    "worker_init_fn": "    next(iter(DataLoader(Stuck('asleep'), num_workers=2, worker_init_fn=Init(HOW), "
    "multiprocessing_context=METHOD)))",
    "the dataset's arrival": "    next(iter(DataLoader(Arrival(HOW), num_workers=2, multiprocessing_context=METHOD)))",
}
# A forked worker inherits its dataset: no dataset arrives.
STARTS = [("worker_init_fn", "fork"), ("worker_init_fn", "spawn"), ("the dataset's arrival", "spawn")]


@pytest.mark.chaos
@pytest.mark.parametrize(("what", "method"), STARTS)
def test_ctrl_c_during_start_up(what: str, method: str, tmp_path: Path) -> None:
    """Ctrl-C while workers are in the user's start-up code ends them before the program, too."""
    source = script(STARTING[what], "in C with the GIL, deaf to SIGTERM", method)
    with program(tmp_path, source, fresh=True) as found, Deaths(found.workers) as deaths:
        os.kill(found.pid, signal.SIGINT)
        code, errors = found.ends()
        assert deaths.ended()
    assert_interrupted("sync", code, errors)


CLOSING = """
    def tell(*_):
        os.write(1, b"asked\\n")
    class Deaf(Stuck):
        def __getitem__(self, index):
            signal.signal(signal.SIGTERM, tell)  # the ladder has come to SIGTERM: `close` waits
            return super().__getitem__(index)
    loader = DataLoader(Deaf("asleep"), num_workers=2)
    batches = iter(loader)
    next(batches), next(batches)
    sys.stdin.readline()
    {end}
"""


@pytest.mark.chaos
@pytest.mark.parametrize("end", ["loader.close()", "del batches, loader", "sys.exit(0)"])
def test_ctrl_c_while_the_workers_are_ended(end: str, tmp_path: Path) -> None:
    """Ctrl-C during `close`, a finalizer or the exit hooks: at most one traceback, and the workers end."""
    with program(tmp_path, script(CLOSING.format(end=end), ""), fresh=True) as found, Deaths(found.workers) as deaths:
        found.go_on()
        found.line("asked")
        os.kill(found.pid, signal.SIGINT)
        code, errors = found.ends()
        deaths.wait()
    assert len(tracebacks(errors)) <= 1, errors
    assert "KeyboardInterrupt" in errors or not errors
    if end == "loader.close()":
        assert_interrupted("sync", code, errors)


@pytest.mark.chaos
def test_ctrl_c_again_and_again(tmp_path: Path) -> None:
    """Five interrupts in a row: the workers end, and the exit code is that of an interrupt."""
    with (
        program(tmp_path, script(CLOSING.format(end="loader.close()"), ""), fresh=True) as found,
        Deaths(found.workers) as deaths,
    ):
        found.go_on()
        found.line("asked")
        for _ in range(5):
            os.kill(found.pid, signal.SIGINT)
        code, errors = found.ends()
        deaths.wait()
    assert code in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in errors


# ------------------------------------------------------------------------------------------- exits


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["asleep", "in C with the GIL, deaf to SIGTERM"])
@pytest.mark.parametrize("name", EXITS)
def test_exit_with_stuck_workers(name: str, how: str, tmp_path: Path) -> None:
    """The program exits with code 0 and without output; its workers end before it does."""
    with program(tmp_path, script(EXITS[name], how), fresh=True) as found, Deaths(found.workers) as deaths:
        found.go_on()
        code, errors = found.ends()
        assert deaths.ended()
    assert (code, errors) == (0, "")


# ------------------------------------------------------------------------------------------- the program is killed


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("how", [how for how in STUCK if how != GRANDCHILD])
def test_the_program_is_killed(how: str, number: int, tmp_path: Path) -> None:
    """Its workers end, too, in whatever state they are; SIGTERM has its default action."""
    with program(tmp_path, script(NEXT["sync"], how)) as found, Deaths(found.workers) as deaths:
        os.kill(found.pid, number)
        deaths.wait()
        code, errors = found.ends()
    assert (code, errors) == (-number, "")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", NEXT)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_program_is_killed_whatever_the_start_method(method: str, kind: str, tmp_path: Path) -> None:
    """Workers that were not forked end, too."""
    source = script(NEXT[kind], "in C with the GIL, deaf to SIGTERM", method)
    with program(tmp_path, source) as found, Deaths(found.workers) as deaths:
        os.kill(found.pid, signal.SIGKILL)
        deaths.wait()
        assert found.ends()[0] == -signal.SIGKILL


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "method"), STARTS)
def test_the_program_is_killed_during_start_up(what: str, method: str, tmp_path: Path) -> None:
    """Workers that are stuck in the user's start-up code end, too."""
    source = script(STARTING[what], "in C with the GIL, deaf to SIGTERM", method)
    with program(tmp_path, source) as found, Deaths(found.workers) as deaths:
        os.kill(found.pid, signal.SIGKILL)
        deaths.wait()
        assert found.ends()[0] == -signal.SIGKILL


@pytest.mark.thorough
def test_the_program_is_killed_while_it_closes(tmp_path: Path) -> None:
    """SIGKILL in the middle of `close`: the workers that `close` had not ended yet end, too."""
    with program(tmp_path, script(CLOSING.format(end="loader.close()"), "")) as found, Deaths(found.workers) as deaths:
        found.go_on()
        found.line("asked")
        os.kill(found.pid, signal.SIGKILL)
        deaths.wait()
        assert found.ends()[0] == -signal.SIGKILL
