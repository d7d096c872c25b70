"""Seeds of the chaos runner: ten always, sixty with `--all`, thousands with `make chaos`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import script_server
from tests.helpers.running import ROOT
from tests.pairwise import quickly

BLOCKS = [(30, 10), (0, 30), (40, 20)]
"""The first seed and the number of seeds of each run, which imports the whole package before it forks."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; a case that hangs is ended by the runner itself."""
    return script_server.run(
        [sys.executable, "-m", "tests.stress", *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "seeds"), quickly(BLOCKS, BLOCKS[0]))
def test_seeds(first: int, seeds: int) -> None:
    """Whatever strikes: every batch once, in its place and to the bit, no hang, and nothing left behind."""
    done = run("--first", str(first), "--seeds", str(seeds))
    assert done.returncode == 0, done.stdout + done.stderr
