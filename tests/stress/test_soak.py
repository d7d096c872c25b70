"""The soak: it runs, and finds a leak; half an hour of it is `python -m tests.stress.soak`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.running import ROOT
from tests.stress.soak import growth


def test_growth_is_told_from_noise() -> None:
    """A slope is found; a level, a peak, and what grows at the beginning only are none."""
    assert growth("descriptors", [10 + number for number in range(30)]) == "descriptors: 17 -> 32 -> 37"
    assert growth("descriptors", [10 + number % 7 for number in range(30)]) == ""
    assert growth("descriptors", [10] * 27 + [90] * 3) == ""
    assert growth("descriptors", [1, 5, 9, 40, 60] + [90] * 25) == ""
    assert growth("MiB", [100 + 2 * number for number in range(60)]) != ""
    assert growth("zombies", [0] * 10 + [2] * 20) != ""
    assert growth("threads", [3.0]) == ""


@pytest.mark.thorough
@pytest.mark.network
@pytest.mark.parametrize("plant", ["", "fd"])
def test_a_short_one(plant: str) -> None:
    """Exact batches under faults; a descriptor that is lost in each epoch is found. Twelve seconds are too short to judge
    any other growth by.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress.soak", "--minutes", "0.2", "--every", "0.5"]
    done = subprocess.run(
        [*command, "--plant", plant], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    grown = [line for line in failures if line.startswith("FAIL grown")]
    assert len(failures) == len(grown), done.stdout + done.stderr
    assert not plant or any(line.startswith("FAIL grown: loader: descriptors") for line in grown), done.stdout
    assert done.returncode == bool(failures), done.stdout + done.stderr
