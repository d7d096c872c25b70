"""A worker's collector and allocator, observed in a process of its own."""

from __future__ import annotations

import sys

import pytest

from tests import script_server
from tests.helpers.running import ROOT, environment


def told(code: str, **variables: str) -> str:
    """Return the output of a process."""
    # A process that was forked may have frozen objects already.
    program = f"import gc\ngc.unfreeze()\nfrom asyncloader.workers.worker import tune\n{code}"
    ran = script_server.run([sys.executable, "-c", program], env=environment() | variables, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.thorough
@pytest.mark.parametrize("concurrent", [False, True])
def test_what_was_there_is_frozen(concurrent: bool) -> None:
    """The collector does not look at objects from before the first task."""
    assert int(told(f"tune(concurrent={concurrent}); print(gc.get_freeze_count())")) > 1000


@pytest.mark.thorough
def test_many_in_flight_are_collected_less_often() -> None:
    """A worker with hundreds of samples in hand collects garbage less often, but does collect it."""
    assert told("tune(concurrent=True); print(gc.get_threshold(), gc.isenabled())") == "(50000, 20, 50) True"


@pytest.mark.thorough
def test_thresholds_of_the_user_stand() -> None:
    """Thresholds that the user has set are kept."""
    assert told("gc.set_threshold(5000, 5, 5); tune(concurrent=True); print(gc.get_threshold())") == "(5000, 5, 5)"


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize("concurrent", [False, True])
def test_freed_samples_leave_their_pages(concurrent: bool) -> None:
    """The next batch's samples fault no pages in, whatever their size and number."""
    code = f"""
import resource, sys
tune(concurrent={concurrent})
for size, number in [(1 << 16, 64), (1 << 18, 8), (600_000, 64), (1 << 22, 10)]:
    for turn in range(6):
        if turn == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        samples = [bytes(size) for _ in range(number)]
        del samples
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = list(map(int, told(code).split()))
    assert len(faults) == 4
    assert max(faults) < 100, faults  # three turns of 512 pages or more
