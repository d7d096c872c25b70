from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.transports.forking_programs import FORKED

ROOT = Path(__file__).parents[3]

HEAD = """
import sys
from asyncloader.transports import object_store_client
from asyncloader.transports.object_store_client import note_use

def refused():
    try:
        note_use()
    except RuntimeError as error:
        raise AssertionError from error
    except Exception as error:
        assert type(error).__name__ == "TransportError" and "would hang for ever" in str(error)
    else:
        raise AssertionError("not refused")
"""

PROGRAMS = {
    "a process that used nothing forks freely": """
        def child():
            note_use()
            note_use()
        forked(child)
    """,
    "a child of a user is refused, and so is its child": """
        note_use()
        forked(refused)
        forked(lambda: forked(refused))
        note_use()
    """,
    "a fork past Python's hooks is told by the pid": """
        note_use()
        object_store_client._forked = None
        object_store_client._user = os.getppid()
        refused()
    """,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_what_a_process_remembers(program: str) -> None:
    """The use is remembered by the process itself and by those that it forks, and by no other."""
    body = "\n".join(line.removeprefix("        ") for line in program.splitlines())
    subprocess.run([sys.executable, "-W", "error", "-c", FORKED + HEAD + body], cwd=ROOT, check=True, timeout=60)
