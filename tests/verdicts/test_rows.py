"""The planted runs whose verdict depends on counts, not on times: in real workers the verdict is right."""

from __future__ import annotations

import logging

import pytest

from tests.verdicts.__main__ import run, table
from tests.verdicts.rows import ROWS

COUNTED = ("a stream with too few shards", "workers near their memory limit")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", COUNTED)
def test_the_verdict_is_right(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The table has the verdict, too."""
    caplog.set_level(logging.ERROR, "asyncloader")
    (row,) = (row for row in ROWS if row.name == name)
    outcome = run(row, kind, 5, grid=False)
    assert outcome.right, outcome.diagnosis
    assert f"| {name} | " in table([outcome])
    assert f"| {outcome.diagnosis.bound} | 1 of 1 |" in table([outcome])
