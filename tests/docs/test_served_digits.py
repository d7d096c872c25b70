"""The service's demo keeps its promises: two trainers outlive a node, and get the batches of workers of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.examples import PATIENTLY, run_example

pytestmark = [pytest.mark.thorough, pytest.mark.network, PATIENTLY]


def test_a_node_is_killed(tmp_path: Path) -> None:
    """It is killed half-way of the first trainer; every fact holds, and the lost node is reported."""
    output = run_example("served_digits.py", tmp_path, "--epochs", "1")
    assert len(re.findall(r"^  yes  trainer", output, re.MULTILINE)) == 4
    assert "  NO " not in output
    assert re.search(r"^tcp://127.0.0.1:\d+ is killed$", output, re.MULTILINE)
    assert re.search(r"^  trainer [12]: worker [01] goes on elsewhere\. It was at tcp://", output, re.MULTILINE)
