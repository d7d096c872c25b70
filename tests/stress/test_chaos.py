"""Seeds of the chaos runner: a hundred always, more behind the marker `chaos`, thousands with `make chaos`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.running import ROOT

CHUNK, LARGE_CHUNK = 10, 50


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; a case that hangs is ended by the runner itself."""
    return subprocess.run(
        [sys.executable, "-m", "tests.stress", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_seeds(first: int) -> None:
    """Whatever strikes: every batch once, in its place and to the bit, no hang, and nothing left behind."""
    done = run("--first", str(first), "--seeds", str(CHUNK))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(100, 500, LARGE_CHUNK))
def test_more_seeds(first: int) -> None:
    """The same for more seeds than every run has time for."""
    done = run("--first", str(first), "--seeds", str(LARGE_CHUNK))
    assert done.returncode == 0, done.stdout + done.stderr
