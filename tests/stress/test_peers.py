"""Hostile peers: 200 with `--all`, thousands with `python -m tests.stress.peers`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.running import ROOT
from tests.stress.hostility import LOADER_ACTS, NODE_ACTS, draw, rng_of, spoiled


def test_all_is_drawn() -> None:
    """Every act of both sides comes within the first seeds; the same seed draws the same case and the same bytes."""
    cases = [draw(seed) for seed in range(2000)]
    assert {case.act for case in cases if case.side == "loader"} == set(LOADER_ACTS)
    assert {case.act for case in cases if case.side == "node"} == set(NODE_ACTS)
    assert {case.place for case in cases} == {"tcp", "tls", "unix"}
    assert cases == [draw(seed) for seed in range(2000)]
    first, again = ([spoiled(rng_of(seed, "x"), b"\x93\x01\x02\x03") for seed in range(40)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 20


@pytest.mark.thorough
@pytest.mark.network
@pytest.mark.parametrize(("side", "seeds"), [("loader", 80), ("node", 20)])
def test_seeds(side: str, seeds: int) -> None:
    """No crash, no stall, no memory without a bound, and exact batches or an error that names the node."""
    options = ["--side", side, "--seeds", str(seeds)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress.peers", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{seeds} draws, 0 failures" in done.stdout
