"""CPUs that are kept busy: by processes that compute, of the lowest priority, which end with the context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncloader.simulation.busy_cpus import busy_cpus
from tests.helpers.running import PATIENCE_S

PROGRAM = """
from asyncloader.simulation.busy_cpus import busy_cpus
import psutil
with busy_cpus(1):
    print(psutil.Process().children()[0].pid, flush=True)
    input()
"""


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.parametrize("number", [-1, 0, 2])
def test_number_of_processes(number: int) -> None:
    """As many processes as asked for run within the context, and none behind it."""
    before = children()
    with busy_cpus(number):
        assert len(children() - before) == max(0, number)
    assert children() == before


def test_no_other_work_waits_for_them() -> None:
    """They have the lowest priority."""
    before = children()
    with busy_cpus(1):
        (process,) = children() - before
        while process.nice() != 19:  # at first it has this process's priority
            assert process.is_running()


def test_they_end_with_a_process_that_is_killed() -> None:
    """Nothing computes for ever after a process that was killed within the context."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as killed:
        assert killed.stdout is not None
        orphan = psutil.Process(int(killed.stdout.readline()))
        killed.kill()
        assert psutil.wait_procs([orphan], PATIENCE_S)[0] == [orphan]
