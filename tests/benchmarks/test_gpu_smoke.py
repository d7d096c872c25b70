"""The benchmark on a card, as far as it goes without one: its command, plan and tables. No speed is asserted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from . import gpu, gpu_plan, gpu_report, sections
from .gpu_plan import LOADERS, OURS, PARTS, PINNED, SPDLS, STAGE, STAGES, TORCHES, WORKERS, GpuJob, Outcome, Run
from .harness import JobFailed, Results
from .plan import ASYNC, FACADE


def test_arguments() -> None:
    """Options that are not given depend on --quick; parts are letters."""
    assert (gpu.parse([]).rounds, gpu.parse([]).soak, gpu.parse([]).parts) == (3, 100_000, tuple("abcde"))
    quick = gpu.parse(["--quick", "--parts", "e,a"])
    assert (quick.rounds, quick.soak, quick.parts) == (1, 2_000, ("e", "a"))
    assert gpu.parse(["--quick", "--rounds", "2", "--soak", "40", "--save"]).soak == 40


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--parts", "a,f"], "no such part: f"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--soak", "3"], "--soak must be at least 4"),
        (["--save", "--parts", "a"], "--save needs all parts"),
        (["--save", "--loaders", "torch"], "--save needs all parts"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that make no sense end the program with 2 and say why."""
    with pytest.raises(SystemExit, match="2"):
        gpu.parse(arguments)
    assert text in capsys.readouterr().err


def test_without_a_card(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA the command says so in one line, and its exit code is 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--quick"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"no CUDA device: .*\n", said.err)


def test_plan() -> None:
    """Parts are chosen, workers bounded by cores; rounds turn around; only the first round soaks."""
    full = Run(cores=16)
    assert [{job.probe for job in Run(parts=[part]).jobs(0)} for part in PARTS] == [
        {"slot"},
        {"end"},
        {"step"},
        {"lock"},
        {"soak"},
    ]
    assert all(max(job.workers) <= 3 for number in (0, 1) for job in Run(cores=3).jobs(number))
    assert full.worker_counts("float32") == WORKERS
    assert Run(cores=1).worker_counts("uint8") == (1,)
    assert [job.probe for job in full.jobs(1)].count("soak") == 0
    ends = [[job for job in full.jobs(number) if job.probe == "end"] for number in (0, 1)]
    assert ends[0] == ends[1][::-1]
    measured = {(job.workload, job.loader, workers) for job in ends[0] for workers in job.workers}
    assert measured == {(dtype, name, workers) for dtype in gpu_plan.DTYPES for name in LOADERS for workers in WORKERS}
    assert all(len(job.workers) == 1 for job in ends[0] if job.loader in SPDLS)
    quick = Run(quick=True, loaders=(*TORCHES, *OURS))
    assert {job.loader for job in quick.jobs(0) if job.probe == "end"} == {*TORCHES, *OURS}
    assert {job.probe for job in quick.jobs(1)} == {"slot", "end"}
    assert all(quick.limit_s(job) < full.limit_s(job) for job in quick.jobs(0))


def test_jobs_travel_as_json() -> None:
    """A job, sent as a command line, is the same job."""
    job = GpuJob("end", "uint8", ASYNC, workers=(2, 4), count=3, seconds=0.5)
    given = json.loads(job.to_json())
    assert GpuJob(**given | {"workers": tuple(given["workers"])}) == job


def fake_job(job: GpuJob, _: float) -> Outcome:
    """Peers fail with 4 workers; nothing else does."""
    if job.probe != "end":
        return Outcome({f"{job.probe}/x": {FACADE: 1.0}}, [])
    failures = ["4 workers: RuntimeError: bus error"] if job.loader in TORCHES else []
    return Outcome({gpu_plan.end_metric(job.workload, 2): {job.loader: 5.0}}, failures)


def test_failures_are_noted() -> None:
    """A peer's failure is noted and the rest goes on; a failure of our loader fails the run."""
    measured = gpu.measure(Run(cores=4, loaders=(*TORCHES, *OURS)), 2, lambda _: None, fake_job)
    assert measured.broken == 0
    assert len(measured.results.failures) == 2 * 2 * len(TORCHES)
    assert measured.results.values[gpu_plan.end_metric("uint8", 2), FACADE] == [5.0, 5.0]

    def broken(job: GpuJob, limit_s: float) -> Outcome:
        if job.loader == ASYNC:
            raise JobFailed(f"no result\nTraceback\n  raise\nValueError: {job.workload}")
        return fake_job(job, limit_s)

    measured = gpu.measure(Run(parts="b", cores=4, loaders=OURS), 1, lambda _: None, broken)
    assert measured.broken == 2
    assert measured.results.failures[0] == f"round 1, end uint8 {ASYNC}: ValueError: uint8"
    assert measured.results.has(gpu_plan.end_metric("float32", 2), FACADE)


def test_quick_runs_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its time is over, a quick run begins no further job, and notes the parts that it leaves out."""
    monkeypatch.setattr(gpu, "QUICK_LIMIT_S", -1.0)
    measured = gpu.measure(Run(parts="ad", quick=True), 1, lambda _: None, fake_job)
    assert measured.notes == ["Round 1: no time for slot.", "Round 1: no time for lock float32."]
    assert not measured.results.values


# ------------------------------------------------------------------------------------------------ tables


def fake_results(factor: float, loaders: Sequence[str] = LOADERS) -> Results:
    """Everything measured twice. Rates: others 100, ours `factor` times that; times and counts: ours divided by it."""
    results = Results()

    def add(metric: str, name: str, value: float) -> None:
        for noise in (1.0, 1.2):
            results.add(metric, name, value * noise)

    for size in gpu_plan.SLOT_SIZES:
        for name in (PINNED, *STAGES):
            add(gpu_plan.slot_metric(size), name, 100.0 * (1.0 if name == PINNED else factor))
    for dtype in gpu_plan.DTYPES:
        for workers in WORKERS:
            for name in loaders:
                scale = factor if name in OURS else 1.0
                add(gpu_plan.end_metric(dtype, workers), name, 100.0 * scale)
                add(gpu_plan.cpu_metric(dtype, workers), name, 1e-3 / scale)
    for name in gpu_plan.STEP_LOADERS:
        add(gpu_plan.CACHED, name, 1e-3)
        add(gpu_plan.FED, name, 1e-3 / factor)
    add(gpu_plan.BATCH_TIME, FACADE, 7e-4)
    for metric in (gpu_plan.LOCK, gpu_plan.PAGES, gpu_plan.UNLOCK, gpu_plan.LOADER_LOCK):
        add(metric, FACADE, 0.12 / factor)
    add(gpu_plan.WRONG, FACADE, 0.0 if factor >= 1 else 3.0)
    add(gpu_plan.COMPARED, FACADE, 100_000)
    add(gpu_plan.SOAK_S, FACADE, 200)
    return results


def test_verdicts_bound_from_the_right_side() -> None:
    """Twice as good as the others keeps every bound, half as good none; each is in the table."""
    for factor, kept in ((2.0, True), (0.5, False)):
        results = fake_results(factor)
        found = gpu_report.verdicts(results)
        assert {each.ok for each in found} == {kept}
        assert {each.part for each in found} == set(PARTS)
        assert len([each for each in found if each.part == "b"]) == 2 * 4 * 2 * 4
        assert all(each.low <= each.value <= each.high for each in found)
        table = gpu_report.verdict_table(results)
        assert table.count("| ok |" if kept else "| **short** |") == len(found)


def test_verdicts_at_the_bound() -> None:
    """As fast as another loader is not ahead of it; 0.95, 1.02 and 0.15 are good enough, a little worse is not."""
    assert not any(each.ok for each in gpu_report.verdicts(fake_results(1.0)) if each.part == "b")
    for part, metric, other, bound, worse in (
        ("a", (gpu_plan.slot_metric("38 MB"), STAGE), (gpu_plan.slot_metric("38 MB"), PINNED), 0.95, 0.949),
        ("c", (gpu_plan.FED, ASYNC), (gpu_plan.CACHED, ASYNC), 1.02, 1.0201),
        ("d", (gpu_plan.LOCK, FACADE), None, 0.15, 0.151),
    ):
        for value, ok in ((bound, True), (worse, False)):
            results = Results()
            results.values[metric] = [value]
            if other is not None:
                results.values[other] = [1.0]
            (found,) = gpu_report.verdicts(results)
            assert (found.part, found.ok) == (part, ok)


def test_tables_leave_out_what_was_not_measured() -> None:
    """Rows of loaders that are not there are left out; nothing measured is no table; one side alone is no verdict."""
    assert gpu_report.tables(Results()) == []
    results = fake_results(2.0, (*TORCHES, *OURS))
    text = "\n".join(gpu_report.tables(results))
    assert "spdl" not in text
    assert "| `DataLoader` | 220 (200 to 240) | 220 (200 to 240) |" in text
    alone = Results()
    alone.add(gpu_plan.end_metric("uint8", 2), FACADE, 5.0)
    assert gpu_report.verdicts(alone) == []
    assert gpu_report.tables(alone) == ["| uint8 images, samples/s | 2 workers |\n|---|--:|\n| `DataLoader` | 5 |"]
    assert gpu_report.missing_note(LOADERS) == []
    assert "SPDL" in gpu_report.missing_note(OURS)[0]


def test_section_is_put_in_its_place(tmp_path: Path) -> None:
    """The section is inserted before another section, or replaces its old version; the rest of the page stays."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n## Before\n\nx\n\n## Memory bandwidth\n\ny\n")
    results = fake_results(1.0)
    results.failures.append("round 1, end uint8: RuntimeError")
    measured = gpu_report.section(results, "command", 2, {"card": "one", "date": "today"}, ["A note."])
    for text in (gpu_report.not_measured(), measured):
        gpu.save(text, page)
        assert text.startswith(gpu_report.TITLE)
        assert page.read_text() == f"# Title\n\n## Before\n\nx\n\n{text}\n\n## Memory bandwidth\n\ny\n"
        assert sections.find(page.read_text(), gpu_report.TITLE) == text
    for part in ("| card | one |", "- A note.", "- Failed: round 1, end uint8: RuntimeError.", "`command`"):
        assert part in measured
    assert sections.find(page.read_text(), "## Other") == ""


def test_conclusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 if every figure is reached, 1 if one is short, and the page is written; 2 if ours failed, and it is not."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    said: list[str] = []
    for broken, factor, code in ((1, 2.0, 2), (0, 0.5, 1), (0, 2.0, 0)):
        said.clear()
        measured = gpu.Measured(fake_results(factor), 2, ["A note."], broken)
        assert gpu.conclude(measured, "command", page, said.append) == code
        assert said[0] == "A note."
        assert (sections.find(page.read_text(), gpu_report.TITLE) == "") == bool(broken)
        assert "| e | batches that differ, of 110,000 | `DataLoader` |" in capsys.readouterr().out
    assert said[-1] == "0 figures short"
    before = page.read_text()
    assert gpu.conclude(gpu.Measured(fake_results(0.5), 2, [], 0), "command", None, said.append) == 1
    assert page.read_text() == before


def test_page_says_where_it_stands() -> None:
    """The docs' page has the section of a run on a card, or says that none was made, and has the bounds."""
    text = sections.find(gpu.PAGE.read_text(encoding="utf-8"), gpu_report.TITLE)
    assert gpu_report.COMMAND in text
    assert text == gpu_report.not_measured() or "| card |" in text
    for wanted in ("at least 0.95", "more than 1", "at most 1.02", "at most 0.15"):
        assert wanted in text


def test_computer() -> None:
    """The page's table names the date and every version, or says that a version is unknown."""
    found = gpu.computer()
    assert found["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert {"CUDA", "driver", "cores", "Python"} <= set(found)
