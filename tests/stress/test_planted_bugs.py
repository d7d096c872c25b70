"""The runner is worth something only if it finds bugs: five that were planted, each within three cases."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests import script_server
from tests.helpers.running import ROOT
from tests.pairwise import quickly
from tests.stress.plants import PLANTS


class Hunt(NamedTuple):
    """Where a planted bug is looked for, and how it must show."""

    scenario: str
    seeds: str
    shows: str
    deadline: int = 60


HUNTS = {
    "no generation check": Hunt("forked", "1,7,8", "saw its batch change"),
    "no re-issue": Hunt("heal", "0,3,4", "hang: no end", 10),
    "slots not reclaimed": Hunt("calm", "1,2,4", "batches were copied out"),
    "reorder off by one": Hunt("heal", "0,1,3", "came in place of"),
    "deadline ignored": Hunt("heal", "48,16,68", "hang: no end", 12),
}


def run(hunt: Hunt, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--scenario", hunt.scenario, "--only", hunt.seeds, "--jobs", "3"]  # all at a time: some wait to be late
    command = [sys.executable, "-m", "tests.stress", *options, *arguments]
    return script_server.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", quickly(PLANTS, "slots not reclaimed"))
def test_it_is_found(bug: str) -> None:
    """The planted bug shows by its effect on the consumer; the same cases pass without it."""
    hunt = HUNTS[bug]
    sound = run(hunt)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    found = run(hunt, "--plant", bug, "--deadline", str(hunt.deadline))
    assert found.returncode == 1, found.stdout + found.stderr
    assert hunt.shows in found.stdout
