"""Runs the suite: a few files at a time, each group in a process that has imported nothing else.

    python -m tests --all -k ring           # pytest's arguments; --jobs 4: four processes at a time
    python -m tests --repeat build/flaky.txt

Tests fork, and a fork takes time for each page of the process: with all files imported it takes four times as long. So
each process is itself a fork, of a process that has imported torch and other common modules, and runs few files.

With `--repeat`, failed tests are repeated once, each alone in an interpreter of its own. If all of them pass then, the
run succeeds, and the reports of their failures are written to that file: they are faults to be explained.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests import early_fork

FILES = 4
"""The most files of a folder that a process runs."""

IMPORTED = [
    "torch",
    "numpy",
    "torch.multiprocessing",
    "hypothesis",
    "pyarrow.parquet",
    "aiohttp",
    "uvloop",
    "_pytest.pytester",
    *early_fork.PACKAGE,
]
"""Imported before the forks, where installed: modules that many files import or that take long. pytest's plugins are
imported, too. The processes that the tests spawn, and their fork servers, have these modules as well (early_fork.py).
"""


class Group:
    """A pytest plugin that leaves out all files but some, and records each test's outcome.

    Args:
        files: the files to run.
        records: the file for the outcomes: a line of JSON for each event, written at once, as a test may end the
            process.
    """

    def __init__(self, files: Sequence[Path], records: Path) -> None:
        self._files = {file.resolve() for file in files}
        # Kept open: a test may run with the permissions of a user that could not open it.
        self._records = os.open(records, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def _record(self, kind: str, name: str, told: str | float = "") -> None:
        os.write(self._records, json.dumps([kind, name, told]).encode() + b"\n")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore the files of other groups."""
        return True if collection_path.suffix == ".py" and collection_path not in self._files else None

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that cannot be imported."""
        if report.failed:
            self._fail(report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the test that begins."""
        self._record("began", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record how a test ended, failures of its setup and teardown included, and how long each phase took."""
        self._record("took", report.nodeid, report.duration)
        if report.failed:
            self._fail(report)
        elif report.when == "call" or report.skipped:
            self._record("xfailed" if hasattr(report, "wasxfail") else report.outcome, report.nodeid)

    def _fail(self, report: Any) -> None:
        text = [str(report.longrepr), *(f"--- {name} ---\n{each}" for name, each in report.sections)]
        self._record("failed", report.nodeid, "\n".join(text))


class Running:
    """A forked process that runs a group of files.

    Args:
        files: the group's files.
        arguments: pytest's arguments.
        folder: for its output.
    """

    def __init__(self, files: list[Path], arguments: list[str], folder: Path) -> None:
        self.files = files
        self._output = folder / "output"
        self._records = folder / "records"
        self._began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(arguments)

    def _run(self, arguments: list[str]) -> None:
        """Run the tests in the fork, and exit as an interpreter does."""
        with self._output.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        # pytest would rewrite the asserts of a plugin's package; this plugin has none.
        options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options.append("--continue-on-collection-errors")
        early_fork.begin()
        sys.exit(pytest.main([*options, *arguments], [Group(self.files, self._records)]))

    @property
    def name(self) -> str:
        """A short form of the file names."""
        first, last = self.files[0], self.files[-1]
        return str(first) if first == last else f"{first} to {last.name}"

    def result(self, status: int) -> tuple[Counter[str], dict[str, str], Counter[str], str]:
        """Return the outcomes of the tests, the reports of failed tests, the seconds of each test, and the output.

        Args:
            status: the process's exit status, as `os.wait` returns it.
        """
        code = os.waitstatus_to_exitcode(status)
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        events = [json.loads(line) for line in self._records.read_text().splitlines()] if self._records.exists() else []
        outcomes = Counter(kind for kind, _, _ in events if kind not in ("began", "failed", "took"))
        failed, took = dict[str, str](), Counter[str]()
        for kind, name, told in events:
            if kind == "failed":
                failed[name] = f"{failed.get(name, '')}{told}\n"
            elif kind == "took":
                took[name] += told
        if code != (pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK) and (
            events or code != pytest.ExitCode.NO_TESTS_COLLECTED
        ):
            last = next((name for kind, name, _ in reversed(events) if kind == "began"), self.name)
            output = f"{output}\n{last}: its process ended with exit code {code}, without the tests after it\n"
            failed[last] = output
        outcomes["failed"] = len(failed)
        return outcomes, failed, took, output

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self._began


def groups_of(paths: Sequence[Path]) -> Iterator[tuple[list[Path], list[Path]]]:
    """Give test files in the order of their names, a few of one folder at a time; and the paths to give to pytest
    for them, as its choice of tests depends on whether a file is named.
    """
    named = sorted(path for path in paths if path.is_file())
    for path, files in (None, named), *((path, sorted(path.rglob("test_*.py"))) for path in paths if path.is_dir()):
        for _, folder in groupby(files, lambda file: file.parent):
            left = list(folder)
            for first in range(0, len(left), FILES):
                group = left[first : first + FILES]
                # The folder: of another, pytest would import the `conftest.py` of each folder in it.
                yield group, group if path is None else [group[0].parent]


def run(groups: Sequence[tuple[list[Path], list[Path]]], options: list[str], jobs: int) -> tuple[int, dict[str, str]]:
    """Run the groups, `jobs` at a time. Returns the number of tests, and the reports of failed tests."""
    total, failed, took, done = Counter[str](), dict[str, str](), Counter[str](), 0
    running: dict[int, Running] = {}
    began = time.monotonic()
    stops, tells = (not set(flags).isdisjoint(options) for flags in (("-x", "--exitfirst"), ("-v", "-s")))
    folder, owner = tempfile.mkdtemp(), os.getpid()
    os.environ["ASYNCLOADER_SCRIPT_SERVERS"] = f"{folder}:{owner}"  # see script_server.py
    try:
        left = [(group, Path(folder, str(number))) for number, group in enumerate(groups)][::-1]
        while left or running:
            while left and len(running) < jobs:
                (files, paths), place = left.pop()
                place.mkdir()
                started = Running(files, [*options, *map(str, paths)], place)
                running[started.pid] = started
            pid, status = os.wait()
            if pid not in running:
                continue
            ended = running.pop(pid)
            outcomes, broken, seconds, output = ended.result(status)
            done += 1
            total += outcomes
            failed |= broken
            took.update(seconds)
            if outcomes.total():
                say(f"[{100 * done // len(groups):3}%] {words(outcomes)} in {ended.seconds:.0f} s: {ended.name}")
            if broken or tells:
                say(output)
            if broken and stops:
                left.clear()
    finally:
        if os.getpid() == owner:  # not in a fork that exits
            shutil.rmtree(folder)
            del os.environ["ASYNCLOADER_SCRIPT_SERVERS"]
    say(f"\n{words(total)} in {time.monotonic() - began:.0f} s")
    for name, seconds_each in took.most_common(10):
        say(f"{seconds_each:6.1f} s {name}")
    for name in failed:
        say(f"FAILED {name}")
    return total.total(), failed


def repeat(failed: dict[str, str], options: list[str], file: Path) -> bool:
    """Run each of these tests once more, alone, and write the reports of those that pass. Returns whether all do."""
    passed = {}
    for name, report in failed.items():
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, name]
        if subprocess.run(command, check=False).returncode == pytest.ExitCode.OK:
            passed[name] = report
    if passed:
        file.parent.mkdir(exist_ok=True)
        file.write_text("FLAKY\n" + "".join(f"\n{name}\n{report}" for name, report in passed.items()))
        say(file.read_text())
    return len(passed) == len(failed)


def words(outcomes: Counter[str]) -> str:
    """Return the outcomes in pytest's words."""
    order = ["failed", "passed", "skipped", "xfailed"]
    return ", ".join(f"{outcomes[kind]} {kind}" for kind in order if outcomes[kind]) or "no tests ran"


def say(text: str) -> None:
    """Print a text at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Run the suite. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=3, help="processes at a time (%(default)s); 0: pytest itself")
    parser.add_argument("--repeat", type=Path, help="repeat what failed, and write here what passes then")
    own, arguments = parser.parse_known_args(arguments)
    jobs, flaky = own.jobs, own.repeat
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background; tests and their programs need it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if jobs < 1 or any("::" in each for each in arguments):
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    paths = [each for each in arguments if not each.startswith("-") and Path(each).exists()]
    options = [each for each in arguments if each not in paths]
    if flaky is not None:
        flaky.unlink(missing_ok=True)
    # Hundreds of processes import the package and its tests, and each would compile them.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in IMPORTED:
        with suppress(ImportError):
            import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    early_fork.exit_without_destructors()
    gc.collect()
    gc.freeze()  # a collection in a fork copies none of it
    groups = list(groups_of([Path(path) for path in paths or ["tests"]]))
    tests, failed = run(groups, options, jobs)
    if not failed:
        return pytest.ExitCode.OK if tests else pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if flaky is not None and repeat(failed, options, flaky) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
