"""The planted runs whose verdict depends on counts, not on times, have it in real workers; what fails, and the page."""

from __future__ import annotations

import logging

import pytest

from asyncloader.telemetry.diagnosis import Diagnosis
from tests.verdicts.__main__ import main, page
from tests.verdicts.measuring import Advised, Times, fact, make, read
from tests.verdicts.rows import ROWS, SEEDED, TORCH, Row

BY_NAME = {row.name: row for row in ROWS}
SLOW: Row = BY_NAME["slow storage"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", ["2 shards for 4 workers", "workers near their memory limit"])
def test_the_verdict_is_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Workers without a shard, and workers that are replaced again and again, are named as the bound."""
    caplog.set_level(logging.ERROR, "asyncloader")
    row = BY_NAME[name]
    with row.beside() as place:
        found = read(row, make(row, row.modes[0], place), 2.0)  # so long that starting workers is not the bound
    assert found.diagnosis.bound == row.bounds, found.diagnosis


def test_failures_and_the_page() -> None:
    """A wrong bound is a failure, and a candidate that gains nothing is not. The page has them all."""
    text = "Input-bound: the consumer waited 99% of the time. Reads wait. Worth trying: num_workers=4."
    good = Advised(SLOW, TORCH, Diagnosis("fetch", {}, text), [({"num_workers": 4}, 0.5)])
    wrong = Advised(SLOW, SEEDED, Diagnosis("cpus", {}, "Busy | full."), [({"num_workers": 4}, 0.5)])
    assert [len(each.failures) for each in (good, wrong)] == [0, 1]
    written = page([good, wrong], {"a quota": "no control group can be made"}, Times())
    assert "| slow storage (torch) | **fetch**: Reads wait. | `num_workers=4` | 0.50 |\n" in written
    assert "| slow storage (seeded) | **cpus**: Busy / full. | `num_workers=4` | 0.50 |\n" in written
    assert written.endswith("Left out on this machine: a quota, as no control group can be made.\n")


def test_parts_of_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict's facts are shown without its advice; part of the rows is not saved."""
    assert fact("Samples cost waiting. Worth trying: num_workers=16.") == "Samples cost waiting."
    with pytest.raises(SystemExit):
        main(["--save", "--rows", "slow"])
    assert "leave out --rows" in capsys.readouterr().err
