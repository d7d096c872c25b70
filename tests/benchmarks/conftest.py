"""Here the processes of measurements are forks of one that has imported torch: no test is about how fast they begin."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import script_server

from . import harness, service


class Forks:
    """Takes the place of `subprocess` where a program of this checkout is started."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired
    env = os.environ | {"PYTHONPATH": str(harness.ROOT)}

    def Popen(self, command: list[str], *, cwd: Path, **options: Any) -> subprocess.Popen[Any]:  # noqa: N802
        """Start it; in an interpreter of its own where it imports another checkout."""
        if cwd != harness.ROOT:
            return subprocess.Popen(command, cwd=cwd, **options)
        return script_server.Forked(command, cwd=cwd, env=self.env, **options)


@pytest.fixture(autouse=True)
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace it in the modules that start measurements."""
    for module in (harness, service):
        monkeypatch.setattr(module, "subprocess", Forks())
