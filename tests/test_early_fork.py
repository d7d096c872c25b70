"""A fork server that was forked early gives its workers what a fork server in a new interpreter gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import PATIENCE_S, ROOT, environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the tests use it only on Linux")

PROGRAM = """
import json, multiprocessing, os, signal, sys
from multiprocessing import forkserver
from tests import early_fork

def look(queue):
    queue.put({
        "arguments": sys.argv,
        "flags": [str(sys.flags), *sys.warnoptions],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "streams": [os.path.exists(f"/proc/self/fd/{each}") for each in (0, 1, 2)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
        "main": sys.modules["__main__"].__name__,
    })
    print("from the worker", file=sys.stderr)

def ask():
    queue = context.SimpleQueue()
    process = context.Process(target=look, args=(queue,))
    process.start()
    seen = queue.get()
    process.join()
    return [forkserver._forkserver._forkserver_pid in waiting, seen]

if __name__ == "__main__":
    if "early" in sys.argv:
        early_fork.begin()
    waiting = early_fork.waiting()[0]
    if "changed" in sys.argv:
        os.environ["CHANGED"] = "yes"
    os.environ["PYTEST_CURRENT_TEST"] = "the test"
    context = multiprocessing.get_context("forkserver")
    answers = [ask(), ask()]
    forkserver._forkserver._stop()
    answers.append(ask())
    print(json.dumps(answers))
"""


def run(script: Path, *arguments: str) -> list[list[Any]]:
    """Two answers of the first fork server and one of the second: whether it was forked early, what a worker sees."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "from the worker\n" * 3)
    answers: list[list[Any]] = json.loads(done.stdout)
    for _, seen in answers:
        seen["arguments"] = seen["arguments"][:1]
    return answers


def test_its_workers_see_what_others_see(tmp_path: Path) -> None:
    """The second fork server of a process is an interpreter, and so is one of a process whose environment changed."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    usual, early, changed = run(script), run(script, "early"), run(script, "early", "changed")
    assert [used for used, _ in usual + early + changed] == [False] * 3 + [True, True, False] + [False] * 3
    assert [seen for _, seen in early] == [seen for _, seen in usual]
    assert all(seen["variables"]["CHANGED"] == "yes" for _, seen in changed)
