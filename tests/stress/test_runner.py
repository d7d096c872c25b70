"""The checks of the runner's processes, tried on cases that misbehave by themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import script_server
from tests.helpers.running import ROOT
from tests.stress import report
from tests.stress.runner import Outcome
from tests.stress.scenarios import draw

SCRIPT = """
import os, select, signal, sys, threading
import torch
from tests.stress import runner
from tests.stress.runner import run_cases
from tests.stress.scenarios import draw

torch.set_num_threads(1)
runner.GRACE_S = 1.0

def hang():
    threading.Event().wait()

def crash():
    os.kill(os.getpid(), signal.SIGKILL)

def leave_a_child():
    main = os.pidfd_open(os.getpid())
    if os.fork() == 0:  # goes on when its parent ends, for a while at least
        select.select([main], [], [])
        select.select([], [], [], 60)
        os._exit(0)
    os.close(main)

for prepare in (hang, crash, leave_a_child):
    case = draw(4, "calm")
    for outcome in run_cases([case], jobs=1, deadline=4 if prepare is hang else 60, prepare=prepare):
        print(prepare.__name__, outcome.hung, "|".join(outcome.problems))
        if prepare is hang:
            print("stacks" if "in hang" in outcome.log else "no stacks", file=sys.stderr)
"""


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_cases_that_misbehave() -> None:
    """A case that hangs is ended, with its stacks in the log; a case that crashes or leaves a process is reported."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = script_server.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=env, timeout=110)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert lines[0].startswith("hang True hang: no end after")
    assert "stacks\n" in done.stderr
    assert lines[1].startswith("crash False the case's process ended with exit code -9")
    assert lines[2].startswith("leave_a_child False")
    assert "outlived the case" in lines[2]


def outcome(seed: int, *problems: str) -> Outcome:
    return Outcome(draw(seed), list(problems), {"batches": 10, "struck": 1, "restarts": 1.0}, "", 1.0)


def test_page_keeps_what_stands_around_the_table(tmp_path: Path) -> None:
    """Written twice, the page has only the newer table, and the text that was written beside it."""
    page = tmp_path / "reliability.md"
    page.write_text(f"# Reliability\n\nBefore.\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
    for outcomes in ([outcome(0), outcome(1)], [outcome(2), outcome(3, "missing: 1"), outcome(5)]):
        report.save(outcomes, "python -m tests.stress", 60.0, page)
    text = page.read_text()
    assert text.startswith("# Reliability\n\nBefore.\n")
    assert text.endswith("\nAfter.\n")
    assert text.count(report.BEGIN) == text.count("**all**") == 1
    assert "| **all** | 3 | 30 | 3 | 3 | 1 | 0 |" in text
    assert "Failed seeds: 3" in text


def test_a_new_page_gets_the_table(tmp_path: Path) -> None:
    """A page that does not exist is made."""
    page = tmp_path / "reference" / "reliability.md"
    report.save([outcome(0)], "python -m tests.stress", 60.0, page)
    assert page.read_text().startswith("# Reliability\n")
    assert page.read_text().rstrip().endswith(report.END)


def test_summary_names_the_seeds_that_failed() -> None:
    """One line has the numbers of the run, and the seeds that failed."""
    line = report.summary([outcome(7), outcome(9, "hang")], 12.0)
    assert line == "2 cases in 12 s, 20 batches, 2 faults struck, 1 failed, 0 hung: 9"
