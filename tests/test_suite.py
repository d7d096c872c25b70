"""The suite's runner, `python -m tests`: no failure is lost, whatever its kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import script_server

ROOT = Path(__file__).parent.parent
GOOD = "def test_good(): pass\ndef test_other(): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass\n@pytest.mark.xfail\ndef test_x(): assert False\n"
BAD = "def test_good(): pass\ndef test_bad(): print('words'); assert 1 == 2\ndef test_behind(): pass\n"
BROKEN = "import nothing_of_this_name\n"
CRASH = "import os\ndef test_good(): pass\ndef test_crash(): os._exit(3)\ndef test_behind(): pass\n"
TEARDOWN = """
import pytest
@pytest.fixture
def given():
    yield
    raise ValueError("torn")
def test_torn(given): pass
"""
FLAKY = """
from pathlib import Path
def test_flaky():
    seen = Path(__file__).with_suffix(".seen")
    there = seen.exists()
    seen.touch()
    assert there
"""


def run(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "tests", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return script_server.run(command, cwd=folder, env=env, timeout=100)


def test_what_passes(tmp_path: Path) -> None:
    """The files of all folders run, each once; skipped tests and expected failures are counted."""
    files = {f"tests/{folder}/test_{number}.py": GOOD for folder in "ab" for number in range(6)}
    ran = run(tmp_path, {**files, "tests/test_skipped.py": SKIPPED, "tests/helper.py": BROKEN})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\n24 passed, 1 skipped, 1 xfailed in " in ran.stdout, ran.stdout
    chosen = run(tmp_path, {}, "tests/a/test_1.py", "tests/b", "-k", "good")
    assert "\n7 passed in " in chosen.stdout, chosen.stdout
    nothing = run(tmp_path, {}, "tests/a/test_1.py", "-k", "nothing_of_this_name")
    assert nothing.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


FAILING = {
    "assertion": (BAD, "::test_bad", "assert 1 == 2"),
    "import": (BROKEN, "", "No module named 'nothing_of_this_name'"),
    "crash": (CRASH, "::test_crash", "its process ended with exit code 3"),
    "teardown": (TEARDOWN, "::test_torn", "ValueError: torn"),
}


def test_what_fails(tmp_path: Path) -> None:
    """It is named with its report, the other files are run, and the exit code is 1; a repetition does not help."""
    files = {f"tests/{kind}/test_it.py": text for kind, (text, _, _) in FAILING.items()}
    ran = run(tmp_path, files | {f"tests/{kind}/test_a.py": GOOD for kind in FAILING}, "--repeat", "flaky.txt")
    assert ran.returncode == 1
    for kind, (_, name, words) in FAILING.items():
        assert f"\nFAILED tests/{kind}/test_it.py{name}\n" in ran.stdout, ran.stdout
        assert words in ran.stdout
    assert "4 failed, 12 passed in " in ran.stdout, ran.stdout
    assert not (tmp_path / "flaky.txt").exists()


@pytest.mark.parametrize("others", [{}, {"tests/test_bad.py": BAD}], ids=["alone", "beside one that fails"])
def test_what_passes_when_repeated(others: dict[str, str], tmp_path: Path) -> None:
    """It is written to the file with its report; the run succeeds only on request, and if no other test failed."""
    files = {"tests/test_flaky.py": FLAKY, **others}
    assert run(tmp_path, files).returncode == 1
    (tmp_path / "tests/test_flaky.seen").unlink()
    ran = run(tmp_path, {}, "--repeat", "build/flaky.txt")
    assert ran.returncode == bool(others), ran.stdout
    report = (tmp_path / "build/flaky.txt").read_text()
    assert report.startswith("FLAKY\n\ntests/test_flaky.py::test_flaky\n")
    assert "assert there" in report
    assert "test_bad" not in report
