"""Runs the documentation's examples as a user would, from a checkout that need not be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.running import without_slow_start

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PATIENTLY = pytest.mark.timeout(300)  # many interpreters that import torch, on a busy machine


def environment(*folders: Path) -> dict[str, str]:
    """Return the environment of a program that finds the package, and modules in these folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))}


def run_example(name: str, folder: Path, *arguments: str) -> str:
    """Run an example to its end, with its files in `folder`. It must not fail, or warn. Returns its output."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), "--folder", str(folder), *arguments],
        cwd=folder.parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert without_slow_start(ran.stderr) == ""
    return ran.stdout
