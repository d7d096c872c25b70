"""Spawned processes and fork servers that are forked early have what they have in new interpreters."""

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
import json, multiprocessing, os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from tests import early_fork

class Refused:
    def __reduce__(self):
        return int, ("no number",)

def look(queue):
    import atexit
    queue.put({
        "new": "multiprocessing" in command(os.getpid()),
        "parent": os.getppid() == multiprocessing.parent_process().pid,
        "arguments": sys.argv,
        "flags": [str(sys.flags), *sys.warnoptions],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "streams": [os.path.exists(f"/proc/self/fd/{each}") for each in (0, 1, 2)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "main": sys.modules["__main__"].__name__,
        "threads": threading.active_count(),
    })
    atexit.register(print, "at exit", file=sys.stderr)
    print("from the worker", file=sys.stderr)
    sys.exit(7)

def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()

def ask(context, method):
    queue = context.SimpleQueue()
    process = context.Process(target=look, args=(queue,))
    process.start()
    seen = queue.get()
    process.join()
    new = seen.pop("new")
    if method == "forkserver":
        new = "multiprocessing" in command(forkserver._forkserver._forkserver_pid)
    return [new, process.exitcode, seen]

if __name__ == "__main__":
    method, *how = sys.argv[1:]
    if "early" in how:
        early_fork.begin()
    if "changed" in how:
        os.environ["CHANGED"] = "yes"
    os.chdir("/")
    os.environ["PYTEST_CURRENT_TEST"] = "the test"
    context = multiprocessing.get_context(method)
    with ExitStack() as stack:
        if "real" in how:
            stack.enter_context(early_fork.interpreters())
        answers = [ask(context, method)]
        if method == "forkserver":
            forkserver._forkserver._stop()
        answers.append(ask(context, method))
        if method == "spawn":  # errors before multiprocessing's own; processes at the same time
            process = context.Process(target=print, args=(Refused(),))
            process.start()
            process.join()
            print("refused", process.exitcode, file=sys.stderr)
            with ThreadPoolExecutor(4) as threads:
                processes = [context.Process(target=sys.exit, args=(number,)) for number in range(4)]
                list(threads.map(lambda each: each.start(), processes))
            for process in processes:
                process.join()
            answers.append([process.exitcode for process in processes])
    print(json.dumps(answers))
"""


def run(script: Path, *arguments: str) -> tuple[list[bool], list[Any], str]:
    """Return whether each process was a new interpreter, what it saw, and stderr without lines of source."""
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
    assert done.returncode == 0, done.stderr
    first, second, *rest = json.loads(done.stdout)
    for _, _, seen in (first, second):
        seen["arguments"] = seen["arguments"][:1]
    # From Python 3.13 on a traceback shows lines of a program of -c, which multiprocessing's own programs are.
    errors = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("    "))
    return [first[0], second[0]], [first[1:], second[1:], *rest], errors


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_they_see_what_others_see(method: str, tmp_path: Path) -> None:
    """Their output, exit codes and errors are the same. If the environment has changed, or a test asks for it, they
    are interpreters.
    """
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    new, usual, errors = run(script, method)
    assert new == [True, True]
    assert run(script, method, "early") == ([False, False], usual, errors)
    assert run(script, method, "early", "real") == ([True, True], usual, errors)
    new, changed, _ = run(script, method, "early", "changed")
    assert new == [True, True]
    assert all(seen["variables"]["CHANGED"] == "yes" for _, seen in changed[:2])
