"""The commonest mistakes, each as a program: the last line that it prints says what to do.

The program of each case is run as a user runs it. `{file}` stands for the program's path in the expected line.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import script_server
from tests.integration.running import environment

GUARD = (
    "asyncloader.errors.WorkerDied: DataLoader worker (pid(s) N) exited unexpectedly: worker N, exit code N. A worker "
    "that is spawned, or comes from a fork server, imports {file}, which makes a loader and reads it while it is "
    'imported. Put what the program does under `if __name__ == "__main__":`.'
)
FIXED = "ValueError: seed is fixed when a loader is made; clone(seed=...) makes another one"
USE_SYNC = (
    "TypeError: AsyncDataLoader is read with 'async for'; for a plain 'for' make an asyncloader.DataLoader, which "
    "takes the same arguments"
)
USE_ASYNC = (
    "TypeError: DataLoader is read with a plain 'for', which blocks; for 'async for' make an "
    "asyncloader.AsyncDataLoader, which takes the same arguments"
)
MISSING = "asyncloader.transports.errors.ObjectNotFound: '{folder}/none/x-000.tar' does not exist"
EXTENSION = (
    "ValueError: the extension of 'x.csv' says no format. Known are .tar, .jsonl, .ndjson, .tfrecord, "
    ".tfrecords, .mds, .tgz, .parquet, all but the last also with .gz or .zst. If it is one of them all the same, give "
    'format=, such as format="tar"; rename it or convert it otherwise'
)
SESSION = (
    "ImportError: Map is defined in __main__ of a session, which a spawned worker cannot import: put it into a module "
    "that can be imported, use multiprocessing_context=\"fork\", or pip install 'asyncloader[notebook]'"
)


class Mistake(NamedTuple):
    """A program; its last line; at most how many lines it prints."""

    program: str
    last: str
    lines: int = 12


IMPORTS = "import asyncio\nfrom asyncloader import AsyncDataLoader, DataLoader, RemoteIterableDataset\n"
READ = "async def main():\n    async for _ in {}: pass\nasyncio.run(main())\n"
FAILING = """
from torch.utils.data import IterableDataset
class Stream(IterableDataset):
    def __iter__(self):
        yield 1
        raise ValueError("broken")
"""
MAP = """
class Map:
    def __len__(self): return 4
    def __getitem__(self, index): return [1, 2][index]
"""

MISTAKES = {
    "for over the async loader": Mistake("for _ in AsyncDataLoader(list(range(9))): pass", USE_SYNC),
    "async for over the sync loader": Mistake(READ.format("DataLoader(list(range(9)))"), USE_ASYNC, 18),
    "an option set afterwards": Mistake("DataLoader(list(range(9))).seed = 3", FIXED),
    "an option of the async loader set afterwards": Mistake("AsyncDataLoader(list(range(9))).seed = 3", FIXED),
    "no guard, spawn": Mistake(
        'for _ in DataLoader(list(range(9)), num_workers=1, multiprocessing_context="spawn"): pass', GUARD
    ),
    "no guard, forkserver": Mistake(
        'for _ in DataLoader(list(range(9)), num_workers=1, multiprocessing_context="forkserver"): pass', GUARD
    ),
    "no guard, async": Mistake(
        READ.format('AsyncDataLoader(list(range(9)), num_workers=1, multiprocessing_context="spawn")'), GUARD, 24
    ),
    "a missing shard": Mistake(
        'for _ in DataLoader(RemoteIterableDataset("none/x-{000..003}.tar")): pass', MISSING, 24
    ),
    "a missing shard, async": Mistake(
        READ.format('AsyncDataLoader(RemoteIterableDataset("none/x-{{000..003}}.tar"))')
        .replace("{{", "{")
        .replace("}}", "}"),
        MISSING,
        36,
    ),
    "a shard of no known format": Mistake('for _ in DataLoader(RemoteIterableDataset("x.csv")): pass', EXTENSION, 70),
    "a failing stream": Mistake(f"{FAILING}\nfor _ in DataLoader(Stream()): pass", "ValueError: broken", 7),
    "a failing stream, async": Mistake(FAILING + READ.format("AsyncDataLoader(Stream())"), "ValueError: broken", 18),
    "a failing stream in a worker": Mistake(
        f"{FAILING}\nfor _ in DataLoader(Stream(), num_workers=1): pass",
        "while reading sample number N of worker N's stream, in worker N (pid N)",
        11,
    ),
    "a failing sample": Mistake(
        f"{MAP}\nfor _ in DataLoader(Map()): pass", "while fetching sample index N (item N of the batch)", 8
    ),
    "a failing sample in a worker": Mistake(
        f"{MAP}\nfor _ in DataLoader(Map(), num_workers=1): pass",
        "while fetching sample index N (item N of the batch), in worker N (pid N)",
        11,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_the_last_line_says_what_to_do(name: str, tmp_path: Path) -> None:
    """Word for word, but for numbers of processes; and there is little to read before it."""
    mistake = MISTAKES[name]
    script = tmp_path / "program.py"
    script.write_text(IMPORTS + mistake.program + "\n")
    ran = script_server.run([sys.executable, str(script)], cwd=tmp_path, env=environment(), timeout=60)
    expected = mistake.last.replace("{file}", str(script)).replace("{folder}", str(tmp_path))
    assert_ends(ran, expected, mistake.lines)


@pytest.mark.thorough
@pytest.mark.parametrize("read_from", ["-c", "-"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_class_of_a_session_needs_cloudpickle(read_from: str, method: str, tmp_path: Path) -> None:
    """Without it the program is told so before a worker is started, with what else may be done."""
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    program = f"{IMPORTS}{MAP}\nfor _ in DataLoader(Map(), num_workers=1, multiprocessing_context={method!r}): pass"
    command = [sys.executable, read_from, *([program] if read_from == "-c" else [])]
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    ran = subprocess.run(
        command, input=program, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=60
    )
    assert_ends(ran, SESSION, 32)


def assert_ends(ran: subprocess.CompletedProcess[str], last: str, most: int) -> None:
    """The program has failed, with this last line, and has printed no more than so many lines."""
    assert ran.returncode == 1
    lines = ran.stderr.rstrip().split("\n")
    assert re.sub(r"\b\d+\b", "N", lines[-1]) == re.sub(r"\b\d+\b", "N", last)
    carets = sum(not line.strip(" ~^") for line in lines)  # their number depends on Python's version
    assert len(lines) - carets <= most, ran.stderr
    assert "never awaited" not in ran.stderr
