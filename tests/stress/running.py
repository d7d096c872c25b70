"""Runs the stress commands from tests: in forks, so that none imports torch anew."""

from __future__ import annotations

import subprocess
import sys

from tests import script_server
from tests.helpers.running import ROOT, environment


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without warnings. What it starts in forks shares the suite's script servers."""
    env = environment() | {"PYTHONWARNINGS": "ignore"} | script_server.sharing()
    return script_server.run([sys.executable, "-m", module, *arguments], cwd=ROOT, env=env, timeout=110)
