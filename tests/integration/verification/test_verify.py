"""`asyncloader verify`: planted faults are found, sound loaders have none, and nothing stays behind.

An interpreter imports torch, for seconds, so the tests share two. A fault is looked for until its problem comes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncloader
from asyncloader.__main__ import main
from asyncloader.verification import verdict
from asyncloader.verification import verify as verify_module
from asyncloader.verification.disturbances import LoaderFacts, disturbances
from asyncloader.verification.findings import Finding
from asyncloader.verification.runs import CannotVerify, RunJob, _kill_worker, import_target, make_loader, run
from asyncloader.verification.server import Interpreter
from asyncloader.verification.user_code import UserFailure
from asyncloader.verification.verify import Verification, verify
from tests.helpers.running import ROOT, Deaths
from tests.integration.verification import awkward, chosen, planted

AWKWARD = Path(awkward.__file__)
WITH_A_LINE = {
    "asynchronous": "random numbers",
    "yielded": "random numbers",
    "in_threads": "random numbers",
    "refused_in_threads": "random numbers",
    "lambda_field": "pickling",
    "open_file": "handles",
    "open_socket": "handles",
    "database": "handles",
}
WITHOUT = {
    "urandom": ("repeated run", 0, "(the batch) is another one in a second run"),
    "unseeded": ("repeated run", 0, "a generator without a seed"),
    "fresh_order": ("repeated run", 0, "in a second run"),
    "hash_order": ("repeated run", 0, "in another process: it depends on the order of a set"),
    "at_import": ("repeated run", 0, "drew or asked at its import"),
    "cursor": ("bytes", 0, "with another epoch read before"),
    "augmented_cache": ("bytes", 0, "with another epoch read before"),
    "by_worker": ("bytes", 0, "with 2 workers (fork)"),
    "lengthening": ("bytes", 8, "goes on behind its 8 batches"),
    "collate_aliases": ("aliased batches", 0, "changed after it was delivered"),
    "undivided": ("duplicates", None, "each of 2 workers gives the same samples"),
    "forgetting": ("resume", None, "resumed after batch"),
    "ending": ("bytes", 7, "the epoch ended before it"),
}

pytestmark = pytest.mark.timeout(400)

Verify = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verify]:
    """Verifies a loader of `planted` or `awkward`, up to its first problem, or to its first of a kind; however long its
    runs take. Returns the findings.
    """
    choice = tmp_path_factory.mktemp("verify") / "choice"
    target = f"{chosen.__file__}:make"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERIFY_CHOICE", str(choice))
        with Interpreter(target, 1) as here, Interpreter(target, 2) as elsewhere:

            def verify_one(name: str, seconds: float = 30.0, kind: str = "", runs: int = 16) -> list[Finding]:
                choice.write_text(name)
                found: list[Finding] = []
                with pytest.MonkeyPatch.context() as unhurried:
                    unhurried.setattr(verify_module, "_ALWAYS", runs)
                    for each in Verification(here, elsewhere, 0, seconds).findings():
                        found.append(each)
                        if each.state == "problem" and kind in ("", each.name):
                            break
                return found

            yield verify_one


def line_of(file: Path, name: str) -> int:
    lines = file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# fault: {name}"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITH_A_LINE)
def test_a_cause_is_named_by_its_line(name: str, verified: Verify) -> None:
    """Draws from the process's generators where nothing seeds them, parts that cannot be pickled, inherited handles."""
    *before, found = verified(name, kind=WITH_A_LINE[name])
    assert (found.state, found.name) == ("problem", WITH_A_LINE[name]), found
    assert not [each.name for each in before if each.state == "problem"], before
    file = Path(str(planted.__file__))
    place = str(file.relative_to(Path.cwd())), line_of(file, name)
    assert (found.figures.get("file"), found.figures.get("line")) == place, found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in {"cursor", "urandom"})) for name in WITHOUT]
)
def test_a_difference_is_named_by_batch_and_field(name: str, verified: Verify) -> None:
    """With the run in which it was seen: of clocks and entropy, of what a dataset keeps between samples, of ends that
    come early or late, of states.
    """
    kind, batch, text = WITHOUT[name]
    found = verified(name, kind=kind)[-1]
    if name == "ending":  # the epoch that is begun again differs first
        assert any(each.figures.get("batch") == 7 and text in each.text for each in verified(name, kind="none"))
        return
    assert (found.state, found.name) == ("problem", kind), found
    assert text in found.text, found
    assert batch is None or found.figures["batch"] == batch, found


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "runs"), [("sound", 7), ("divided", 4), ("local_class", 4), ("strange", 1)])
def test_a_sound_loader_has_no_problem(name: str, runs: int, verified: Verify) -> None:
    """Each disturbance gives the same bytes (the first seven are of all kinds and start methods), and a dataset that
    only forked workers can get is a note. What the function does to its process besides is no fault.
    """
    findings = verified(name, 0.01, runs=runs)
    assert [each.name for each in findings if each.state == "note"] == [
        *["pickling"] * (name == "local_class"),
        "disturbed runs",
    ], findings
    assert len(findings[-1].figures["runs"]) == runs, findings


@pytest.mark.thorough
def test_a_sampler_may_count_its_epochs(verified: Verify) -> None:
    """Where no seed says that an epoch can be read again, another order in the next is a note."""
    findings = verified("weighted", 0.01, runs=4)
    assert [each.state for each in findings if each.name == "bytes"] == ["note"], findings
    assert not [each for each in findings if each.state == "problem"], findings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sound", "divided", "local_class"])
def test_a_sound_loader_has_no_problem_in_any_drawn_run(name: str, verified: Verify) -> None:
    """All sixteen runs give the same bytes."""
    findings = verified(name, 300.0)  # for a busy machine: a run ends with its last batch
    assert len(findings[-1].figures["runs"]) == 16, findings


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "finding", "text"),
    [
        ("raising", "make_loader", "RuntimeError: no data here"),
        ("unspeakable", "make_loader", "making the loader raised Unspeakable"),
        ("unparsed", "make_loader", "making the loader raised SyntaxError"),
        ("endless", "undisturbed run", "did not end in time"),
    ],
)
def test_a_loader_that_cannot_be_run(
    name: str, finding: str, text: str, verified: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that raised, or never ends, is named."""
    monkeypatch.setattr(verify_module, "_LEAST_CAP_S", 6.0)
    found = verified(name, 6.0)[-1]
    assert found.name == finding
    assert text in found.text
    assert found.figures["line"] == line_of(AWKWARD, name)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere_at_all:make", "have no module 'nowhere_at_all'"),
        (f"{AWKWARD}:absent", "has no 'absent'"),
        (f"{AWKWARD}:iterator", "returned a .*Iter: let it return a DataLoader"),
        (f"{AWKWARD}:nothing", "returned a NoneType: let it return a DataLoader"),
        ("{folder}/train.v2.py:make", "have no module 'train'"),
        ("nowhere.py:make", "have no module 'nowhere'"),
        ("{folder}/random.py:make", "`import random` gives .*random.py, which hides it: rename the file"),
        ("{folder}/sys.py:make", "`import sys` gives a module of Python itself"),
    ],
)
def test_targets_that_make_no_loader(target: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Are refused with a text that says why."""
    for name in ("random", "sys"):
        (tmp_path / f"{name}.py").write_text("make = dict\n")
    target = target.replace("{folder}", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "awkward", awkward)
    with pytest.raises(CannotVerify, match=why):
        make_loader(import_target(target), 0)


def test_a_module_that_cannot_be_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is named, though no frame is in it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "unparsed.py").write_text("def make():\n    return (\n")
    with pytest.raises(SyntaxError) as caught:
        import_target(f"{tmp_path}/unparsed.py:make")
    found = verdict.broken("import", UserFailure.of(caught.value), "importing the module")
    assert (found.figures["file"], found.figures["line"]) == (str(tmp_path / "unparsed.py"), 2)


@pytest.mark.thorough
def test_a_process_that_is_killed(verified: Verify) -> None:
    """The signal, and how far the run was."""
    found = verified("deadly")[-1]
    assert (found.name, found.state) == ("undisturbed run", "problem")
    assert found.text.endswith("the process was killed by signal 9 while batch 1 was being made")


@pytest.mark.parametrize(("name", "state"), [("make_loader", "problem"), ("disturbed run", "note")])
def test_a_run_without_end_that_shows_no_line(name: str, state: str) -> None:
    """Is a problem, because nothing was verified, but for a disturbed run: the machine may be busy."""
    assert verdict.broken(name, UserFailure("did not end in time", late=True), "the run").state == state


@pytest.mark.thorough
def test_a_target_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Ends the command with a line that says why, and exit code 2."""
    assert main(["verify", f"{AWKWARD}:absent"]) == 2
    told = capsys.readouterr().err
    assert "has no 'absent'" in told
    assert told.count("\n") == 1


@pytest.mark.thorough
def test_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process of a run, and nothing of what is printed is kept or shown."""
    monkeypatch.setenv("VERIFY_MARKS", str(tmp_path))
    assert main(["verify", f"{AWKWARD}:chatty", "--seconds", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert pids
    running = {each.pid for each in psutil.process_iter() if each.status() != psutil.STATUS_ZOMBIE}
    assert not running.intersection(pids)


def test_a_slow_start_leaves_batches_to_compare() -> None:
    """The time of a run is counted from its first batch: two are read at least."""
    found = run(RunJob(batches=5, seconds=0.0), planted.cursor, lambda _: None)
    assert (len(found.batches), found.failure) == (2, None)


@pytest.mark.thorough
def test_nothing_goes_on_without_the_command(tmp_path: Path) -> None:
    """A job whose command was killed ends at once, though the user's code does not."""
    (tmp_path / "endless.py").write_text(
        f"import os, threading\n\n\n"
        f"def make():\n    open({str(tmp_path / 'began')!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
        f"    threading.Event().wait()\n"
    )
    os.mkfifo(tmp_path / "began")
    command = [sys.executable, "-m", "asyncloader", "verify", f"{tmp_path}/endless.py:make"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        with (tmp_path / "began").open() as began:
            server = Deaths([int(began.readline())])  # waits until it has begun
        running.kill()
    server.wait()


def test_only_a_worker_is_killed() -> None:
    """The user's own processes, started before, are left alone."""
    helper = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    helper.start()
    try:
        with asyncloader.DataLoader[Any](planted.Rows(), batch_size=4, num_workers=1, seed=1) as loader:
            batches = iter(loader)
            next(batches)
            _kill_worker()
            assert len([*batches]) == 7
            assert loader.stats()["data/worker_restarts"] == 1
        assert helper.is_alive()
    finally:
        helper.kill()
        helper.join()
        helper.close()


@pytest.mark.thorough
def test_the_fixture_fails_a_test(tmp_path: Path) -> None:
    """With the findings in words; a sound loader passes."""
    test = tmp_path / "test_it.py"
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["asyncloader.integrations.pytest"]\n')
    body = "def test_{0}(asyncloader_verify):\n    asyncloader_verify('{1}:{0}', seconds=0.01)\n\n\n"
    test.write_text(body.format("raising", AWKWARD) + body.format("sound", AWKWARD))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), "--rootdir", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert f"awkward.py:{line_of(AWKWARD, 'raising')} in raising: making the loader raised RuntimeError" in done.stdout


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_seconds_that_are_no_time(seconds: float) -> None:
    """Are refused before anything is started."""
    with pytest.raises(ValueError, match="seconds should be above 0 and at most 86400"):
        next(verify("nowhere:make", seconds=seconds))


def test_draws_follow_from_the_seed() -> None:
    """The same seed draws the same runs, another seed others; a stream keeps its number of workers, threads are not
    killed, and a single batch has no place to resume from.
    """
    facts = LoaderFacts("torch.DataLoader", False, False, False, 2, False, "fork", False, False, False)
    ways = ["fork", "spawn"]
    one, same, other = (list(disturbances(facts, ways, 9, seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert {each.kind for each in one} == {"again", "plain", "break", "kill", "resume"}
    stream = facts._replace(iterable=True, workers=3)
    assert {each.workers for each in disturbances(stream, ways, 9, 1)} == {3}
    assert "kill" not in {each.kind for each in disturbances(facts, ["threads"], 9, 1)}
    assert "resume" not in {each.kind for each in disturbances(facts, ways, 1, 1)}
