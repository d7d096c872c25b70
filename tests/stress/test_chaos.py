"""Seeds of the chaos runner: twenty always, a hundred with `--all`, thousands with `make chaos`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import script_server
from tests.helpers.running import ROOT
from tests.pairwise import quickly

CHUNK = 10


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; a case that hangs is ended by the runner itself."""
    return script_server.run(
        [sys.executable, "-m", "tests.stress", *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", quickly(range(0, 100, CHUNK), 30))
def test_seeds(first: int) -> None:
    """Whatever strikes: every batch once, in its place and to the bit, no hang, and nothing left behind."""
    done = run("--first", str(first), "--seeds", str(CHUNK))
    assert done.returncode == 0, done.stdout + done.stderr
