"""Seeds of the service's misfortunes: a few with `--all`, thousands with `python -m tests.stress.nodes`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.running import ROOT
from tests.stress.nodes import FAULTS, draw


def test_all_is_drawn() -> None:
    """Every fault, dataset and number of loaders comes within the first seeds; the same seed draws the same case."""
    cases = [draw(seed) for seed in range(200)]
    assert {kind for case in cases for _, kind, _ in case.strikes} == set(FAULTS)
    assert {case.name for case in cases} == {"numbers", "awaited", "stream"}
    assert {case.loaders for case in cases} == {1, 2, 3}
    assert cases == [draw(seed) for seed in range(200)]


@pytest.mark.thorough
@pytest.mark.network
def test_seeds() -> None:
    """Whatever strikes three nodes and the network before them: every batch once, in its place and to the bit."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress.nodes", "--seeds", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 seeds" in done.stdout
