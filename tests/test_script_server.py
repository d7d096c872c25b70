"""A program that the script server forks behaves as in a fresh interpreter."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import script_server
from tests.helpers.running import PATIENCE_S, ROOT, environment

HEAD = "from __future__ import annotations\nimport os, sys\n"
PROGRAMS = {
    "what it sees": """
import json, signal, threading, warnings, random, multiprocessing
print(__name__, __file__, __spec__, __package__, sys.modules["__main__"].__dict__ is globals(), __builtins__)
print(sys.argv, sys.path, sys.flags, sys.warnoptions, os.getcwd(), sys.stdout.line_buffering)
print(sorted(os.environ.items()))
print(os.getpgid(0) == os.getpgid(os.getppid()), os.getsid(0), signal.getsignal(signal.SIGINT), os.umask(0o22))
print(threading.enumerate() == [threading.main_thread()], len(os.listdir("/proc/self/task")))
places = {each: f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")}
opened = [int(each) for each, place in places.items() if os.path.exists(place) and ".so" not in os.path.realpath(place)]
print(sorted(opened), multiprocessing.get_start_method(), sys.stdin.read())
import torch
print(torch.get_num_threads(), *warnings.filters, sep="\\n")
""",
    "unflushed output": 'sys.stdout.write("no newline"); sys.stderr.write("no newline")',
    "an exit code, and C's output": 'import ctypes; ctypes.CDLL(None).printf(b"of C"); sys.exit(7)',
    "words at the end": 'sys.exit("words")',
    "exit hooks": 'import atexit; atexit.register(print, "hook"); print("end")',
    "a thread that outlives it": """
import threading
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), print("after"))).start()
""",
    "an exception": "def fail():\n    raise ValueError('words')\n\nfail()",
    "a warning": "import warnings\nwarnings.warn('words')",
    "no Python": "a b",
    "a signal": "os.kill(0 or os.getpid(), 9)",
    "an interruption": "import signal; signal.raise_signal(signal.SIGINT)",
    "a spawned process": """
import multiprocessing
class Words(list):
    pass
def work(queue):
    queue.put(Words([__name__, __file__, os.getcwd(), sys.argv, sys.warnoptions]))
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        words = queue.get()
        print(words, type(words) is Words)
        process.join()
""",
}


def fresh(command: list[str], **arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **arguments)


def told(
    run: Callable[..., subprocess.CompletedProcess[str]], command: list[str], folder: Path
) -> tuple[int, str, str]:
    done = run(command, cwd=folder, env=environment())
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_a_fresh_interpreter(name: str, tmp_path: Path) -> None:
    """Output, errors and exit code are the same."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + PROGRAMS[name])
    command = [sys.executable, str(script), "an argument", "-x"]
    ours, theirs = told(script_server.run, command, tmp_path), told(fresh, command, tmp_path)
    if name == "an interruption":  # the server's frames stand in its traceback
        ours, theirs = (*ours[:2], ours[2][-30:]), (*theirs[:2], theirs[2][-30:])
    assert ours == theirs


def test_each_program_has_other_random_numbers(tmp_path: Path) -> None:
    """The generators that are seeded when their modules are imported are seeded again."""
    program = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1))"
    command = [sys.executable, "-c", program]
    one, other = (told(script_server.run, command, tmp_path) for _ in range(2))
    assert one[0] == other[0] == 0
    assert not set(one[1].split()) & set(other[1].split())


@pytest.mark.parametrize("program", [["-c", "import sys; print(sys.argv, sys.path[0], __name__)"], ["-m", "printing"]])
def test_other_kinds_of_program(program: list[str], tmp_path: Path) -> None:
    """Programs of ``-c`` and ``-m`` get their arguments."""
    (tmp_path / "printing.py").write_text("import sys; print(sys.argv, sys.path[0], __name__, __spec__.name)")
    command = [sys.executable, *program, "an argument"]
    assert told(script_server.run, command, tmp_path) == told(fresh, command, tmp_path)


def test_it_is_waited_for_talked_to_and_killed(tmp_path: Path) -> None:
    """A started program has pipes and a pid, and ends by the signal that it was sent; a hanging program times out."""
    command = [sys.executable, "-c", "print(input(), flush=True); input()"]
    with script_server.start(command, cwd=tmp_path, env=environment(), stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("words\n")
        process.stdin.flush()
        assert process.stdout.readline() == "words\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == process.returncode == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        script_server.run(
            [sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path, env=environment(), timeout=0.2
        )


def test_descriptors_that_are_passed(tmp_path: Path) -> None:
    """They have the numbers that the program's arguments name."""
    ends = [os.pipe() for _ in range(4)]
    try:
        passed = [end for _, end in reversed(ends)]
        program = "import os, sys; [os.write(int(each), each.encode()) for each in sys.argv[1:]]"
        command = [sys.executable, "-c", program, *map(str, passed)]
        with script_server.Forked(command, cwd=tmp_path, env=environment(), pass_fds=passed) as process:
            assert process.wait(PATIENCE_S) == 0
        assert [int(os.read(read, 10)) for read, _ in ends] == [end for _, end in ends]
    finally:
        for end in ends:
            os.close(end[0])
            os.close(end[1])


OWNER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from tests import script_server
from tests.helpers.running import environment
done = script_server.run([sys.executable, "-c", "import os; print(os.getppid())"], cwd="/", env=environment())
if os.fork() == 0:
    signal.pause()  # and keeps a copy of the connection
print(done.stdout.strip(), flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_a_server_ends_with_the_process_that_started_it() -> None:
    """It also ends if that process is killed while its forked child lives."""
    command = [sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, start_new_session=True, stdin=pipe, stdout=pipe) as owner:
        assert owner.stdin
        assert owner.stdout
        server = os.pidfd_open(int(owner.stdout.readline()))
        try:
            owner.stdin.close()
            assert owner.wait(PATIENCE_S) == -signal.SIGKILL
            assert select.select([server], [], [], PATIENCE_S)[0]
        finally:
            os.close(server)
            os.killpg(owner.pid, signal.SIGKILL)


ASKER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests import script_server
from tests.helpers.running import environment
assert script_server.SHARED not in os.environ
done = script_server.run([sys.executable, "-c", "import os; print(os.getppid())"], cwd="/", env=environment())
print(done.stdout.strip())
"""


@pytest.mark.thorough
def test_forks_of_the_suites_runner_share_a_server(tmp_path: Path) -> None:
    """It outlives each of them, and ends with the runner."""
    command = [sys.executable, "-c", ASKER]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as runner:
        env = {**os.environ, script_server.SHARED: f"{tmp_path}:{runner.pid}"}
        ran = (subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True) for _ in "ab")
        first, second = ran
        assert first.stdout == second.stdout != ""
        server = os.pidfd_open(int(first.stdout))
        try:
            runner.kill()
            assert select.select([server], [], [], PATIENCE_S)[0]
        finally:
            os.close(server)
