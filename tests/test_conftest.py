"""The leak check works: each kind of resource left behind fails the test that left it, and is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LEAKS = {
    "child": (
        """
        import os, subprocess, sys
        kept = []
        def test_it():
            kept.append(subprocess.Popen([sys.executable, "-c", "pass"]))
            os.waitid(os.P_PID, kept[0].pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
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

# A failed test leaves a cycle through the traceback, which pytest keeps until the next test is called.
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


def run_pytest(folder: Path, sources: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run test files, given by name, under the suite's own conftest, in a fresh interpreter."""
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(source))
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


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return pytest's report on each of the files above."""
    files = {"failing": FAILING} | {kind.replace(" ", "_"): source for kind, (source, _) in LEAKS.items()}
    ran = run_pytest(tmp_path_factory.mktemp("leaks"), files, "-vv")
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    said = dict.fromkeys(files, "")
    for part in re.split(r"^(?=_{3,} |FAILED |ERROR |PASSED |=)", ran.stdout, flags=re.MULTILINE):
        for name in files:
            if f"test_{name}.py" in part:
                said[name] += part
    return said


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the check reads /proc")
@pytest.mark.parametrize("kind", LEAKS)
def test_leak_fails_the_test_that_left_it(kind: str, reports: dict[str, str]) -> None:
    """A leak of each kind turns a passing test into an error, and the report names it."""
    said = reports[kind.replace(" ", "_")]
    assert "ERROR test_" in said, said
    assert LEAKS[kind][1] in said, said


def test_what_a_failed_test_left_is_collected(reports: dict[str, str]) -> None:
    """It is collected one test later: no later test finds its threads and descriptors."""
    said = reports["failing"]
    assert [len(re.findall(rf"^{ending} ", said, re.MULTILINE)) for ending in ("FAILED", "PASSED")] == [1, 2], said


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("option", "chosen", "loops"),
    [
        ("-q", 2 + 0 + 1 + 2 + 1 + 3, 1),
        ("--ci", 2 + 1 + 1 + 2 + 1 + 3, 1),
        ("--all", 8 + 6, 2),
        ("--combinations", 8 + 12, 2),
    ],
)
def test_how_much_is_chosen(option: str, chosen: int, loops: int, tmp_path: Path) -> None:
    """Each value, each pair of values or every combination is chosen; both loops with `--all` only, thorough tests also
    with `--ci` where they must detect a planted bug. Tests that clean up pass.
    """
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutants.toml").write_text('["a bug"]\ntests = "../test_chosen.py"\n')
    files = {"chosen": CHOSEN, "clean": CLEAN}
    ran = run_pytest(tmp_path, files, option, "-W", "ignore::pytest.PytestUnknownMarkWarning")
    assert ran.returncode == pytest.ExitCode.OK, ran.stdout + ran.stderr
    assert f"{chosen + 1 + loops} passed" in ran.stdout, ran.stdout
    found = {line.split()[-1] for line in ran.stdout.splitlines() if "loop:" in line}
    assert len(found) == (1 if sys.platform == "win32" else loops), ran.stdout


WITHOUT = """
import sys
for name in ("aiofiles", "hypothesis", "psutil", "pytest_asyncio", "pytest_timeout", "uvloop", "xdist"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]))
"""


@pytest.mark.thorough
def test_the_gpu_tests_need_no_more_than_torch_numpy_and_pytest() -> None:
    """On a machine with a card and nothing else installed they start; without a card they are skipped."""
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
