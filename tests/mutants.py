"""Plants bugs, one at a time, and runs the tests that should detect them, as CI does: `python -m tests.mutants`.

The bugs are in `mutants.toml`. They are planted in a temporary copy of the tracked files. A bug that no test detects is
a survivor: it shows a gap in the tests, and the exit code is 1. It is 2 where the list itself is wrong: a text that
does not occur exactly once in its file, or tests that fail without a bug.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUGS = Path(__file__).with_suffix(".toml")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n0", "--ci")
LIMIT_S = 900.0  # for the tests of a bug
WHOLE_S = 7200.0  # for the whole suite


class ListError(Exception):
    """The list of bugs does not fit the code, or the tests do not pass without a bug."""


class Bug(NamedTuple):
    """A change of a file, and the test files that should fail by it. Paths are from the checkout's root."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The package of the changed file."""
        path = Path(self.file)
        place = path.parent if len(path.parts) > 2 else path.with_suffix("")
        return ".".join(place.parts[1:])


class Finding(NamedTuple):
    """The outcome of a bug: `killed_by` names the first test that failed, and is empty for a survivor."""

    bug: Bug
    killed_by: str
    seconds: float


def read(path: Path) -> list[Bug]:
    """Return the bugs of the list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Bug(name, bug["file"], bug["old"], bug["new"], tuple(f"tests/{each}" for each in bug["tests"].split()))
        for name, bug in entries.items()
    ]


def mutated(bug: Bug, root: Path) -> str:
    """Return the file's text with the bug in it.

    Raises:
        ListError: the text does not occur, occurs more than once, or the change is no valid Python.
    """
    file = root / bug.file
    if not file.is_file():
        raise ListError(f"{bug.name}: there is no {bug.file}")
    text = file.read_text(encoding="utf-8")
    if (count := text.count(bug.old)) != 1:
        raise ListError(f"{bug.name}: {bug.file} has {count} times {bug.old!r}")
    changed = text.replace(bug.old, bug.new)
    if changed == text:
        raise ListError(f"{bug.name}: it changes nothing")
    try:
        compile(changed, bug.file, "exec")
    except SyntaxError as error:
        raise ListError(f"{bug.name}: {bug.file} with {bug.new!r} is no Python: {error}") from error
    return changed


def check(bugs: Iterable[Bug], root: Path) -> None:
    """Check the whole list before any test is run.

    Raises:
        ListError: has a line for every entry that is wrong.
    """
    wrong: list[str] = []
    for bug in bugs:
        wrong += [f"{bug.name}: there is no {test}" for test in bug.tests if not (root / test).is_file()]
        try:
            mutated(bug, root)
        except ListError as error:
            wrong.append(str(error))
    if wrong:
        raise ListError("\n".join(wrong))


def copy_tree(root: Path, to: Path) -> None:
    """Copy the tracked files as they are in the working tree, links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_symlink() or (root / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)


def run_tests(root: Path, tests: Sequence[str], limit_s: float) -> str:
    """Run these tests in this tree. Returns the first test that failed, or an empty text.

    Raises:
        ListError: pytest could not run them.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*PYTEST, *tests],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # processes that a test under a bug has left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
    if code == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+(?: in \S+)?)", said, re.MULTILINE)
    if code == 1 and failed:
        return failed[1]
    if code < 0:
        return f"the test run died of signal {-code}"
    raise ListError(f"pytest ended with {code}:\n{said[-3000:]}")


def rewrite(file: Path, text: str) -> None:
    """Write the file, and advance its time by a second: by time and size Python recognizes stale compiled code."""
    changed = file.stat().st_mtime_ns + 1_000_000_000
    file.write_text(text, encoding="utf-8")
    os.utime(file, ns=(changed, changed))


def hunt(bug: Bug, root: Path, tests: Sequence[str], limit_s: float) -> Finding:
    """Plant the bug in this tree, run the tests, and restore the file."""
    file = root / bug.file
    sound = file.read_text(encoding="utf-8")
    started = time.monotonic()
    try:
        rewrite(file, mutated(bug, root))
        killed_by = run_tests(root, tests, limit_s)
    except ListError as error:
        raise ListError(f"{bug.name}: {error}") from error
    finally:
        rewrite(file, sound)
    return Finding(bug, killed_by, time.monotonic() - started)


def row(finding: Finding) -> str:
    """Return the finding as a line of the table."""
    killed_by = finding.killed_by or "**survived**"
    return f"| {finding.bug.name} | {finding.bug.room} | {killed_by} | {finding.seconds:.0f} |"


def run(bugs: Sequence[Bug], root: Path, *, whole: bool) -> list[Finding]:
    """Plant all bugs, printing the table. Returns the survivors.

    Raises:
        ListError: the list is wrong.
    """
    check(bugs, root)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy_tree(root, copy)
        if failed := run_tests(copy, sorted({test for bug in bugs for test in bug.tests}), WHOLE_S):
            raise ListError(f"without any bug {failed} fails")
        print("| bug | room | killed by | seconds |\n|---|---|---|--:|", flush=True)
        survivors: list[Finding] = []
        for bug in bugs:
            finding = hunt(bug, copy, bug.tests, LIMIT_S)
            print(row(finding), flush=True)
            if not finding.killed_by:
                survivors.append(finding)
        if whole:
            found = [hunt(finding.bug, copy, (), WHOLE_S) for finding in survivors]
            print("".join(f"{row(finding)[:-1]}| by the whole suite\n" for finding in found), end="", flush=True)
            survivors = [finding for finding in found if not finding.killed_by]
    print(f"\n{len(bugs) - len(survivors)} of {len(bugs)} bugs killed", flush=True)
    return survivors


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="run the whole suite against those that survive")
    parser.add_argument("--only", default="", help="bugs whose name, file or tests have this text")
    parser.add_argument("--check", action="store_true", help="only look whether the list fits the code")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in read(BUGS) if options.only in " ".join((bug.name, bug.file, *bug.tests))]
    try:
        if options.check:
            check(bugs, ROOT)
            return 0
        return 1 if run(bugs, ROOT, whole=options.whole) else 0
    except ListError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
