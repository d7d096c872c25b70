from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.transports.forking_programs import FORKED

ROOT = Path(__file__).parents[3]

HEAD = """
import sys
from asyncloader.transports import fork_hazard
from asyncloader.transports.object_store_client import note_use, used_before_fork

def refused():
    assert used_before_fork()
    try:
        note_use()
    except RuntimeError as error:
        raise AssertionError from error
    except Exception as error:
        assert type(error).__name__ == "TransportError" and "would hang for ever" in str(error)
    else:
        raise AssertionError("not refused")
    assert used_before_fork()
"""

PROGRAMS = {
    "a process that used nothing forks freely": """
        def child():
            assert not used_before_fork()
            note_use()
            note_use()
            assert used_before_fork()
        forked(child)
        assert not used_before_fork()
    """,
    "a child of a user is refused, and so is its child": """
        note_use()
        assert used_before_fork()
        forked(refused)
        forked(lambda: forked(refused))
        note_use()
    """,
    "a fork past Python's hooks is told by the pid": """
        note_use()
        fork_hazard._forked = None
        fork_hazard._user = os.getppid()
        refused()
    """,
    "nothing is imported": """
        assert not {"obstore", "asyncio", "aiohttp", "multiprocessing"} & (sys.modules.keys() - before)
    """,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_what_a_process_remembers(program: str) -> None:
    """The use is remembered by the process that did it and by those that it forks, and by no other."""
    body = "\n".join(line.removeprefix("        ") for line in program.splitlines())
    # What importing any module of the package imports is not this module's doing.
    begin = "import sys, asyncloader.transports.errors\nbefore = set(sys.modules)\n"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", begin + FORKED + HEAD + body], cwd=ROOT, check=True, timeout=60
    )
