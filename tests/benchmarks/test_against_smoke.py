"""The comparison of two checkouts: its arithmetic, its verdicts, and one small run. No speed is asserted."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from . import __main__ as command
from . import against
from .against import MEAN_FLOOR, ROW_FLOOR, bounds, compare, measure, plan, table
from .child import check_tree
from .harness import ROOT, JobFailed, Results, verify
from .plan import ASYNC_PLAIN, FACADE, METRICS, OURS, ROWS, Job


def results(values: dict[str, tuple[float, ...]], loader: str = FACADE) -> Results:
    """So many rounds of these metrics."""
    return Results({(metric, loader): list(each) for metric, each in values.items()})


def test_bounds_are_student_t_on_logarithms() -> None:
    """Three rounds of 1, 2 and 4: mean 2, and t = 4.303 standard errors of ln 2 / sqrt 3 to either side."""
    ratio = bounds([math.log(each) for each in (1.0, 2.0, 4.0)])
    spread = math.exp(4.303 * math.log(2) / math.sqrt(3))
    assert ratio == pytest.approx((2.0, 2.0 / spread, 2.0 * spread))


@pytest.mark.parametrize(("rounds", "t"), [(2, 12.706), (10, 2.262), (21, 2.086), (24, 2.086), (26, 2.060)])
def test_t_of_as_many_degrees_of_freedom_as_rounds_less_one(rounds: int, t: float) -> None:
    """Between two entries of the table the entry of fewer degrees counts."""
    logs = [0.01 * (-1) ** number for number in range(rounds)]
    error = statistics.stdev(logs) / math.sqrt(rounds)
    assert math.log(bounds(logs).high) - statistics.fmean(logs) == pytest.approx(t * error)


def test_more_than_one_is_better_in_every_row() -> None:
    """Twice the rate is 2, and so is half the CPU time; a row's rounds are paired in their order."""
    new = results({"ints/touch": (200.0, 20.0), "cpu/small": (1.0, 10.0)})
    old = results({"ints/touch": (100.0, 10.0), "cpu/small": (2.0, 20.0)})
    rate, cpu = compare(new, old).rows
    assert (rate.metric.key, cpu.metric.key) == ("ints/touch", "cpu/small")
    assert rate.ratio == pytest.approx((2.0, 2.0, 2.0))
    assert cpu.ratio == pytest.approx((2.0, 2.0, 2.0))
    assert (rate.old, rate.new) == (55.0, 110.0)


def test_a_round_is_one_observation_of_the_mean() -> None:
    """Two rows that go up and down against each other leave the mean of every round, and its bounds, at 1."""
    steady = (100.0, 100.0, 100.0)
    new = results({"ints/touch": (200.0, 100.0, 50.0), "small/touch": (50.0, 100.0, 200.0)})
    comparison = compare(new, results({"ints/touch": steady, "small/touch": steady}))
    assert comparison.mean == pytest.approx((1.0, 1.0, 1.0))
    assert all(row.ratio.low < 0.5 and row.ratio.high > 2.0 for row in comparison.rows)


@pytest.mark.parametrize(
    ("factors", "short"),
    [((1.0, 1.0), 0), ((0.981, 1.0), 0), ((0.979, 1.01), 1), ((0.985, 0.985), 1), ((0.97, 0.97), 3)],
)
def test_floors_bind_the_upper_bound(factors: tuple[float, float], short: int) -> None:
    """Without noise the bounds are the ratio: a row is short below 0.98, the mean below 0.99."""
    keys = ("ints/touch", "small/touch")
    old = results(dict.fromkeys(keys, (100.0, 100.0)))
    new = results({key: (100.0 * factor,) * 2 for key, factor in zip(keys, factors, strict=True)})
    comparison = compare(new, old)
    assert comparison.short() == table(comparison).count("**short**") == short


def test_noise_is_no_proof() -> None:
    """A row that is slower in one round and faster in the other is not short."""
    comparison = compare(results({"ints/touch": (80.0, 110.0)}), results({"ints/touch": (100.0, 100.0)}))
    assert comparison.rows[0].ratio.mean < ROW_FLOOR < MEAN_FLOOR
    assert comparison.short() == 0


def test_differences_have_no_ratio() -> None:
    """What may be zero or less is left out; the rest of their rows is compared."""
    new = results({"shuffle/first": (1.0, 1.0), "shuffle/memory": (0.0, 4096.0)})
    assert [row.metric.key for row in compare(new, new).rows] == ["shuffle/first"]
    assert {metric.key for metric in METRICS} >= set(against.NO_RATIO)


def test_the_plan_has_ours_alone() -> None:
    """Each loader of ours in every row, none of torch's, and each alone in its process."""
    for row in ROWS:
        assert {job.loader for job in plan((row,), 1.0, full=False)} - {ASYNC_PLAIN} == set(OURS)
    assert {job.loader for job in plan(ROWS, 1.0, full=False)} == {*OURS, ASYNC_PLAIN}


def test_options(tmp_path: Path) -> None:
    """Ten rounds unless said otherwise, no page, and a path that is a checkout."""
    options = command.parse(["--save", "--rows", "ints", "--against", str(ROOT)])
    assert (options.rounds, options.save) == (10, False)
    assert command.parse(["--quick", "--against", str(ROOT), "--rounds", "3"]).rounds == 3
    for wrong in (["--against", str(tmp_path)], ["--against", str(ROOT), "--rounds", "1"]):
        with pytest.raises(SystemExit):
            command.parse(wrong)


def test_a_package_of_another_tree_is_refused(tmp_path: Path) -> None:
    """A child measures the tree that its job names, or fails."""
    here = str(ROOT / "asyncloader" / "__init__.py")
    check_tree(here, "")
    check_tree(here, str(ROOT))
    for found, tree in ((here, str(tmp_path)), (str(tmp_path / "asyncloader" / "__init__.py"), ""), (None, "")):
        with pytest.raises(ImportError, match="was to come from"):
            check_tree(found, tree)


@pytest.mark.thorough
def test_another_tree_is_what_the_child_imports(tmp_path: Path) -> None:
    """The package of the named tree runs, whatever is in it: here one that says so."""
    (tmp_path / "asyncloader").mkdir()
    (tmp_path / "asyncloader" / "__init__.py").write_text("raise ImportError('the other tree')")
    with pytest.raises(JobFailed, match="the other tree"):
        measure(tmp_path, lambda _: [Job("inline", "ints", FACADE)], 1, lambda _: None)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_this_tree_against_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows, two rounds: each has a ratio, both trees' content was verified, and the exit code is the table's."""
    verified: list[tuple[str, str]] = []

    def verifying(results: Results) -> list[str]:
        verified.extend(results.checksums)
        return verify(results)

    def short(*_: object, full: bool) -> list[Job]:
        return [Job("throughput", "small", FACADE, seconds=0.0, full=full)]

    monkeypatch.setattr(against, "plan", short)
    monkeypatch.setattr(command, "verify", verifying)
    code = command.main(["--against", str(ROOT), "--rounds", "2"])
    said = capsys.readouterr()
    assert code == ("**short**" in said.out), said.err
    assert verified == [("small", f"new {FACADE}"), ("small", f"old {FACADE}")]
    assert [line.split(" | ")[0] for line in said.out.splitlines()[2:]] == [
        "| 32 samples, dict of 2 small arrays and an int",
        "| main-process CPU seconds per 1000 small batches",
        "| geometric mean",
    ]
