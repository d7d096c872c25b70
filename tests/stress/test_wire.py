"""Changed inputs to all readers of network bytes: some with `--all`, millions with `python -m tests.stress.wire`."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.helpers.running import ROOT
from tests.stress.wire import Target, read_block
from tests.stress.wire_inputs import Original, changed

ORIGINALS = [Original((b"\x93\x00\x01\x02", bytes(40)), b"".join)]


def test_changes() -> None:
    """Equal seeds make equal inputs, and different seeds different inputs."""
    inputs, again = ([changed(random.Random(seed), ORIGINALS) for seed in range(500)] for _ in range(2))
    assert inputs == again
    assert len(set(inputs)) > 300


def test_what_a_reader_raises_is_found() -> None:
    """A reader's exception is found, with the input that caused it."""

    def read(data: bytes) -> None:
        if data[:1] != b"\x93":
            raise KeyError(data[0])

    found = [(data, error) for data, error in read_block(random.Random(0), Target(ORIGINALS, read, 1)) if error]
    assert found
    for data, error in found:
        with pytest.raises(type(error)):
            read(data)


@pytest.mark.thorough
@pytest.mark.network
def test_inputs() -> None:
    """Every input is read or refused."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress.wire", "--inputs", "30000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30,000 inputs" in done.stdout
    assert " 0 faults" in done.stdout
