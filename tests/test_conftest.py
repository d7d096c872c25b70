"""The leak check bites: each kind of thing left behind fails the test that left it, and names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LEAKS = {
    "child": (
        """
        import subprocess, sys
        kept = []
        def test_it():
            kept.append(subprocess.Popen([sys.executable, "-c", "pass"]))
            kept[0].stdin = None
        """,
        "ended, but nobody waited for it",
    ),
    "thread": (
        """
        import threading
        def test_it():
            threading.Thread(target=threading.Event().wait, daemon=True, name="forgotten").start()
        """,
        "thread: <Thread(forgotten",
    ),
    "descriptor": (
        """
        import os
        def test_it():
            os.pipe()
        """,
        "descriptor:",
    ),
    "segment": (
        """
        import mmap, os
        kept = []
        def test_it():
            fd = os.memfd_create("asyncloader-test")
            os.ftruncate(fd, 4096)
            kept.append(mmap.mmap(fd, 4096))
            os.close(fd)
        """,
        "memfd:asyncloader-test",
    ),
    "signal handler": (
        """
        import signal
        def test_it():
            signal.signal(signal.SIGTERM, lambda *_: None)
        """,
        "signal handler: 15",
    ),
    "task": (
        """
        import asyncio
        kept = []
        async def test_it():
            kept.append(asyncio.ensure_future(asyncio.Event().wait()))
        """,
        "tasks left pending by this test",
    ),
}

CLEAN = """
    import asyncio, os, subprocess, sys, threading
    def test_sync():
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        thread = threading.Thread(target=threading.Event)
        thread.start()
        for fd in os.pipe():
            os.close(fd)
    async def test_async():
        await asyncio.ensure_future(asyncio.to_thread(os.getpid))
        print("loop:", type(asyncio.get_running_loop()).__module__)
"""

# What a failed test leaves is a cycle through the traceback, which pytest keeps until the next test is called.
FAILING = """
    import weakref
    left = []
    class Thing:
        pass
    def test_fails():
        thing = Thing()
        thing.itself = thing
        left.append(weakref.ref(thing))
        assert thing is None
    def test_next():
        assert left[0]() is not None
    def test_after():
        assert left[0]() is None
"""


def run_pytest(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `source` as a test file under the suite's own conftest, in a fresh interpreter."""
    lines = source.strip("\n").splitlines()
    margin = len(lines[0]) - len(lines[0].lstrip())
    (folder / "test_inner.py").write_text("\n".join(line[margin:] for line in lines) + "\n")
    conftest = (HERE / "conftest.py").read_text()
    assert "GRACE_S = 20.0" in conftest
    (folder / "conftest.py").write_text(conftest.replace("GRACE_S = 20.0", "GRACE_S = 0.2"))
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-rA", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the check reads /proc")
@pytest.mark.parametrize("kind", LEAKS)
def test_leak_fails_the_test_that_left_it(kind: str, tmp_path: Path) -> None:
    """A leaked thing of each kind turns a passing test into an error, and the report says what it is."""
    source, words = LEAKS[kind]
    ran = run_pytest(tmp_path, source)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert words in ran.stdout, ran.stdout


@pytest.mark.parametrize(("option", "number"), [("--all", 2), ("--combinations", 2), ("-q", 1)])
def test_clean_tests_pass_on_both_loops(option: str, number: int, tmp_path: Path) -> None:
    """A test that cleans up passes, and each async test runs once a loop; on one of them without `--all`."""
    ran = run_pytest(tmp_path, CLEAN, option)
    assert ran.returncode == pytest.ExitCode.OK, ran.stdout + ran.stderr
    loops = {line.split()[-1] for line in ran.stdout.splitlines() if "loop:" in line}
    assert len(loops) == (1 if sys.platform == "win32" else number), ran.stdout


CHOSEN = """
    import pytest
    @pytest.mark.loops
    async def test_loops():
        pass
    @pytest.mark.thorough
    def test_thorough():
        pass
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_methods(method):
        pass
    @pytest.mark.spawns
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_spawns(method):
        pass
    @pytest.mark.parametrize("method", ["spawn"])
    def test_spawn_alone(method):
        pass
    @pytest.mark.parametrize("a", "123")
    @pytest.mark.parametrize("b", "45")
    @pytest.mark.parametrize("c", "67")
    def test_values(a, b, c):
        pass
"""


@pytest.mark.parametrize(
    ("option", "number"), [("-q", 2 + 0 + 1 + 2 + 1 + 3), ("--all", 8 + 6), ("--combinations", 8 + 12)]
)
def test_how_much_is_chosen(option: str, number: int, tmp_path: Path) -> None:
    """Each value, each pair of values or every combination; what costs much with `--all` only."""
    ran = run_pytest(tmp_path, CHOSEN, option, "-W", "ignore::pytest.PytestUnknownMarkWarning")
    assert f"{number} passed" in ran.stdout, ran.stdout + ran.stderr


def test_what_a_failed_test_left_is_collected(tmp_path: Path) -> None:
    """One test later it is gone: no later test finds its threads and descriptors."""
    ran = run_pytest(tmp_path, FAILING)
    assert "1 failed, 2 passed" in ran.stdout, ran.stdout + ran.stderr


WITHOUT = """
import sys
for name in ("aiofiles", "hypothesis", "psutil", "pytest_asyncio", "pytest_timeout", "uvloop", "xdist"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]))
"""


def test_the_gpu_tests_need_no_more_than_torch_numpy_and_pytest() -> None:
    """A machine with a card need not have the rest: they begin there, and without a card are skipped."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=HERE.parent,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == pytest.ExitCode.OK, ran.stdout + ran.stderr
    assert re.search(r"=+ \d+ skipped[ ,]", ran.stdout), ran.stdout
