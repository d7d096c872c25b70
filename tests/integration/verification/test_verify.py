"""`asyncloader verify`: planted faults are named by their lines, sound loaders have none, and nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import pytest

from asyncloader.__main__ import main
from asyncloader.commands.findings import Finding
from asyncloader.verification.junit import as_junit
from asyncloader.verification.plan import LoaderFacts, disturbances
from asyncloader.verification.verify import verify
from tests.helpers.running import ROOT
from tests.integration.verification import awkward, planted

PLANTED, AWKWARD = Path(planted.__file__), Path(awkward.__file__)
FAULTS = {
    "urandom": "random numbers",
    "clock": "random numbers",
    "uuid4": "random numbers",
    "unseeded": "random numbers",
    "secret": "random numbers",
    "hash_order": "random numbers",
    "asynchronous": "random numbers",
    "cursor": "kept state",
    "own_generator": "kept state",
    "module_state": "kept state",
    "in_place": "kept state",
    "collate_mutates": "kept state",
    "collate_aliases": "aliased batches",
    "growing": "length",
    "lambda_field": "pickling",
    "open_file": "handles",
    "open_socket": "handles",
    "database": "handles",
    "held_lock": "handles",
    "same_seeds": "worker_init_fn",
    "fresh_order": "random numbers",
    "going_on": "kept state",
    "by_rank": "ranks",
    "forgetting": "resume",
    "undivided": "duplicates",
}
Run = Callable[..., tuple[int, dict[str, Any]]]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command, and returns its exit code and its output from JSON."""

    def call(*argv: Any) -> tuple[int, dict[str, Any]]:
        code = main(["verify", *map(str, argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def line_of(file: Path, name: str) -> int:
    lines = file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# fault: {name}"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "cursor")) for name in FAULTS]
)
def test_a_planted_fault_is_named_by_its_line(name: str, run: Run) -> None:
    """It is a problem of its kind, at the line that has it."""
    code, answer = run(f"{PLANTED}:{name}", "--seconds", 12)
    assert code == 1
    problems = [each for each in answer["findings"] if each["state"] == "problem" and each["name"] == FAULTS[name]]
    places = [(each["figures"].get("file"), each["figures"].get("line")) for each in problems]
    assert (str(PLANTED.relative_to(Path.cwd())), line_of(PLANTED, name)) in places, answer


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sound", "divided", "local_class"])
def test_a_sound_loader_has_no_problem(name: str, run: Run) -> None:
    """Every disturbance gives the same bytes, and a dataset that only forked workers can get is a note."""
    code, answer = run(f"{AWKWARD}:{name}", "--seconds", 40)
    assert code == 0, answer
    notes = [
        each["name"] for each in answer["findings"] if each["state"] == "note" and each["name"] != "disturbed runs"
    ]
    assert notes == ["pickling"] * (name == "local_class")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "finding", "text"),
    [
        ("raising", "make_loader", "RuntimeError: no data here"),
        ("deadly", "undisturbed run", "was killed by signal 9"),
        ("endless", "undisturbed run", "did not end in time"),
    ],
)
def test_a_loader_that_cannot_be_run(name: str, finding: str, text: str, run: Run) -> None:
    """The line that raised, ended its process, or never ends, is named."""
    code, answer = run(f"{AWKWARD}:{name}", "--seconds", 12)
    assert code == 1
    found = next(each for each in answer["findings"] if each["state"] == "problem")
    assert found["name"] == finding
    assert text in found["text"]
    line = line_of(AWKWARD, name)
    assert found["figures"]["line"] in ((line - 1, line) if name == "endless" else (line,))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere_at_all:make", "there is no module 'nowhere_at_all'"),
        (f"{AWKWARD}:absent", "has no 'absent'"),
        (f"{AWKWARD}:needs", "needs arguments: root"),
        (f"{AWKWARD}:iterator", "return the loader, not an iterator"),
    ],
)
@pytest.mark.thorough
def test_targets_that_make_no_loader(target: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """End with a line that says why, and exit code 2."""
    assert main(["verify", target]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


@pytest.mark.thorough
def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Processes that have left the session are ended, and what is printed is neither kept nor shown."""
    monkeypatch.setenv("VERIFY_MARKS", str(tmp_path))
    code, _ = run(f"{AWKWARD}:chatty", "--seconds", 8)
    assert code == 0
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert pids
    running = {each.pid for each in psutil.process_iter() if each.status() != psutil.STATUS_ZOMBIE}
    assert not running.intersection(pids)


@pytest.mark.thorough
def test_a_module_that_reads_its_loader_when_it_is_imported(tmp_path: Path) -> None:
    """It is told where the guard is missing, and does not hang."""
    file = tmp_path / "unguarded.py"
    file.write_text("import torch\n\n\ndef make():\n    return torch.utils.data.DataLoader([1, 2])\n\n\nlist(make())\n")
    findings = list(verify(f"{file}:make"))
    assert [each.name for each in findings] == ["import"]
    assert findings[0].figures["line"] == 8


@pytest.mark.thorough
def test_the_fixture_fails_a_test(tmp_path: Path) -> None:
    """With the findings in words; a sound loader passes."""
    test = tmp_path / "test_it.py"
    body = "def test_{0}(asyncloader_verify):\n    asyncloader_verify('{1}:{0}', seconds=8)\n\n\n"
    test.write_text(body.format("cursor", PLANTED) + body.format("sound", AWKWARD))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["asyncloader.integrations.pytest"]\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), "--rootdir", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert f"planted.py:{line_of(PLANTED, 'cursor')} in __getitem__: changes dataset.seen" in done.stdout


def test_draws_follow_from_the_seed() -> None:
    """The same seed draws the same runs, another seed others; a stream keeps its number of workers."""
    facts = LoaderFacts(iterable=False, workers=2, methods=["fork", "spawn"], batches=9, ranks=True)
    assert list(disturbances(facts, 1)) == list(disturbances(facts, 1)) != list(disturbances(facts, 2))
    assert {each.kind for each in disturbances(facts, 1)} == {"again", "plain", "break", "kill", "resume", "ranks"}
    stream = facts._replace(iterable=True, workers=3, ranks=False)
    assert {each.workers for each in disturbances(stream, 1)} == {3}


def test_junit() -> None:
    """Problems are failures with file and line; characters that XML forbids do not break the file."""
    findings = [
        Finding("loader", "ok", "<a>"),
        Finding("kept state", "problem", "a\0\x1b & b", "do", {"file": "a.py", "line": 3}),
    ]
    root = ET.fromstring(as_junit("m:f", findings, 1.5))
    suite = root[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("time")) == ("2", "1", "1.500")
    assert suite[1].attrib == {"classname": "m:f", "name": "kept state", "file": "a.py", "line": "3"}
    failure = suite[1][0]
    assert (failure.tag, failure.get("message"), failure.text) == ("failure", "a?? & b", "a?? & b\ndo")
