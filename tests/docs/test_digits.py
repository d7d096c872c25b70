"""The demo keeps its promises: it trains to the accuracy that it names, and compares four ways to load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.examples import EXAMPLES, PATIENTLY, environment, run_example

pytestmark = [pytest.mark.slow, PATIENTLY]


def test_demo_trains_and_reports(tmp_path: Path) -> None:
    """More than 95 % of the test digits are classified rightly; the output has stages, verdict and rates."""
    folder = tmp_path / "digits"
    output = run_example("digits.py", folder)

    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy
    assert float(accuracy[1]) > 95

    stages = set(re.findall(r"^  (\w+) +[\d.]+ ms +[\d.]+ ms$", output, re.MULTILINE))
    assert {"sampler", "queue", "fetch", "collate", "write", "transfer", "order", "wait", "consumer"} <= stages
    assert re.search(r"^(Input|Consumer)-bound: ", output, re.MULTILINE)

    rates = re.findall(r"^  (?:asyncloader|torch), .*? +([\d,]+) +([\d,]+)$", output, re.MULTILINE)
    assert len(rates) == 4
    ours, *_, torchs = (float(far.replace(",", "")) for _, far in rates)
    assert 0 < torchs < ours
    assert re.search(r"^Far away the async dataset is \d+ times as fast", output, re.MULTILINE)


def test_pictures_are_written_once(tmp_path: Path) -> None:
    """A second run reads the files that the first run wrote."""
    folder = tmp_path / "digits"
    program = "import pathlib, digits, sys; digits.write_digits(pathlib.Path(sys.argv[1]))"

    def write() -> dict[str, int]:
        command = [sys.executable, "-c", program, str(folder)]
        subprocess.run(command, check=True, env=environment(EXAMPLES))
        return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.png")}

    first = write()
    assert len(first) == 1797
    assert write() == first
