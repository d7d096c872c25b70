"""Drawn cases in which one thing fails at a drawn moment; a thousand with `python -m tests.stress --interrupted`."""

from __future__ import annotations

import os
import sys

import pytest

from tests import script_server
from tests.helpers.running import ROOT


@pytest.mark.timeout(300)
def test_interrupted_epochs() -> None:
    """Nothing is lost, doubled or left behind, and every state resumes with the rest."""
    done = script_server.run(
        [sys.executable, "-m", "tests.stress", "--interrupted", "--first", "220", "--seeds", "30"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
