"""`asyncloader bench` finds faster settings, leaves out loaders that fail, and reports errors.

The tests share an interpreter, because the import of torch takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncloader.__main__ import main
from asyncloader.benchmarking import bench as bench_module
from asyncloader.benchmarking.bench import SERVER, Benchmark, bench
from asyncloader.commands.findings import Finding
from asyncloader.verification.interpreter import Interpreter
from tests.integration.benchmarking import loaders

Bench = Callable[..., tuple[Benchmark, dict[str, Finding]]]

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Give a function that benchmarks a loader of `loaders`, and returns the benchmark and its findings by name."""
    choice = tmp_path_factory.mktemp("bench") / "choice"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_CHOICE", str(choice))
        with Interpreter(f"{loaders.__file__}:make", None, SERVER) as interpreter:

            def run_bench(name: str, seconds: float) -> tuple[Benchmark, dict[str, Finding]]:
                choice.write_text(name)
                made = Benchmark(interpreter, seconds)
                return made, {each.name: each for each in made.findings()}

            yield run_bench


@pytest.mark.thorough
def test_a_faster_setting_is_found(benched: Bench) -> None:
    """For samples that wait, more workers or threads are found; the gain comes from the runs after the choice."""
    made, found = benched("waiting", 1.0)
    answer = found["setting"]
    assert answer.state == "problem", found
    assert answer.figures["low"] > 1.5
    assert answer.figures["setting"]["workers"] + answer.figures["setting"]["concurrency"] > 1
    rounds = [each.contender for each in made.outcome.runs if each.phase == "rounds"]
    assert made.outcome.best is not None
    assert rounds.count(made.outcome.given) == 2 * rounds.count(made.outcome.best) > 0
    assert "torch's DataLoader, num_workers=0" in found["same options"].text
    assert 10 < found["rate"].figures["batches_per_sec"] < 50  # a sample takes at least 20 ms
    assert found["verdict"].figures["bound"] == "fetch"


@pytest.mark.thorough
def test_torchs_loader(benched: Bench) -> None:
    """The search varies asyncloader's loader, which is compared with the user's loader of torch."""
    _, found = benched("torchs", 2.0)
    assert found["loader"].text.startswith("torch.DataLoader, map dataset, num_workers=1")
    assert found["setting"].state == "problem"
    assert found["setting"].advice.startswith("use asyncloader.DataLoader with ")
    assert found["same options"].text.startswith("asyncloader.DataLoader, num_workers=1: ")


@pytest.mark.thorough
def test_a_failing_setting_is_not_chosen(benched: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that refuses threads is read without them, and the finding on the search names the error."""
    # No numbers of workers, which are measured before threads and may use up the time.
    monkeypatch.setattr(bench_module, "apply_predictions", lambda *_: [])
    made, found = benched("one_thread", 1.0)
    chosen = made.outcome.best
    assert chosen is not None
    assert not chosen.setting.threads
    assert not chosen.setting.concurrency
    assert "failed" in found["search"].text
    assert "not in this thread" in found["search"].text


@pytest.mark.thorough
def test_an_async_dataset(benched: Bench) -> None:
    """Torch's loader, which cannot read it, is not measured; more samples in flight are found to be faster."""
    _, found = benched("awaited", 2.0)
    assert "AsyncDataLoader" in found["loader"].text
    assert found["same options"].text == "torch's DataLoader was not measured: the dataset's methods are async"
    assert found["setting"].figures["low"] > 1.5


@pytest.mark.thorough
def test_a_stream_keeps_its_workers(benched: Bench) -> None:
    """The search tries no other number of workers, which would change the samples."""
    made, _ = benched("stream", 0.1)
    assert {each.contender.setting.workers for each in made.outcome.runs} == {2}


@pytest.mark.thorough
def test_short_epochs_are_measured_with_their_starts(benched: Bench) -> None:
    """The gain of persistent workers, which shows only at an epoch's start, is found."""
    made, found = benched("short", 6.0)
    assert made.outcome.result["epochs"] >= 1
    assert found["setting"].state == "problem", found
    assert found["setting"].figures["setting"]["persistent"] or not found["setting"].figures["setting"]["workers"]


@pytest.mark.thorough
def test_a_number_that_the_loader_chooses(benched: Bench) -> None:
    """A run finds the number first; the loader is then measured like any other."""
    made, found = benched("automatic", 4.0)
    assert 'num_workers="auto" has chosen' in found["loader"].text
    assert made.outcome.given.setting.workers >= 1
    assert "setting" in found


def test_a_loader_that_fails(benched: Bench) -> None:
    """The finding names the line that raised, and no other loader is measured."""
    made, found = benched("failing", 2.0)
    lines = Path(loaders.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "finding names" in text)
    assert list(found) == ["loader", "rate"]
    assert (found["rate"].state, found["rate"].figures["line"]) == ("problem", line)
    assert "sample 0 is damaged" in found["rate"].text or "sample 1 is damaged" in found["rate"].text
    assert len(made.outcome.runs) == 1


def test_a_loader_without_batches(benched: Bench) -> None:
    """The benchmark ends without a rate, and does not wait for batches."""
    _, found = benched("empty", 2.0)
    assert found["rate"].state == "problem"
    assert "fewer than two batches" in found["rate"].text


@pytest.mark.thorough
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with 1 if a setting is faster, prints JSON, and writes the report."""
    page = tmp_path / "report.html"
    assert main(["bench", f"{loaders.__file__}:waiting", "--seconds", "1", "--json", "--html", str(page)]) == 1
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not said["ok"]
    assert said["findings"][-1]["name"] == "setting"
    assert said["findings"][-1]["text"] in page.read_text()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_unusable_seconds(seconds: float) -> None:
    """A time that is not above 0, or above a day, is refused before a process starts."""
    with pytest.raises(ValueError, match="seconds should be above 0 and at most 86400"):
        next(bench("nowhere:make", seconds=seconds))


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before any run."""
    assert main(["bench", "nowhere:make", "--html", str(tmp_path / "no" / "report.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
