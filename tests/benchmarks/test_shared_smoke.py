"""The benchmark of `share`: its sampler, its checks and its table, on a few strings. No number is asserted."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import quickly

from . import shared
from .harness import JobFailed

STRINGS = 8000


@pytest.mark.thorough
@pytest.mark.parametrize("loader", quickly(shared.LOADERS, shared.OURS_SHARED))
def test_configuration_is_measured_and_verified(loader: str) -> None:
    """A configuration runs in a process of its own to the end, and gives every number of its row."""
    row = shared.run_apart(loader, "fork", STRINGS)
    assert row[:3] == (loader, "fork", STRINGS)
    assert (row.prepare > 0) == (loader == shared.OURS_SHARED)
    assert min(row.first, row.pss_start, row.pss_end, row.rate) > 0
    lines = shared.table([row]).splitlines()
    assert loader in lines[2]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("size", [1, 2, 1000, 8000, 100_000])
def test_every_string_is_read_once(size: int) -> None:
    """The scattered order is a permutation."""
    assert sorted(shared.Scattered(size)) == list(range(size))


def test_batches_are_spread() -> None:
    """No two indices of a batch are near each other, so that each worker touches every page of a list."""
    batch = sorted(list(shared.Scattered(100_000))[:1000])
    assert min(right - left for left, right in itertools.pairwise(batch)) > 30


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_wrong_contents_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong batch is an error, not a number."""
    monkeypatch.setattr(shared.Names, "__getitem__", lambda self, index: 0)
    with pytest.raises(JobFailed, match="the batch up to string 1000 differs"):
        shared.run(shared.OURS_SHARED, "fork", STRINGS)


@pytest.mark.thorough
def test_failure_has_the_reason() -> None:
    """The error has the output of the configuration's process."""
    with pytest.raises(JobFailed, match=r"exit code 1[\s\S]*nonsense"):
        shared.run_apart(shared.OURS_PLAIN, "nonsense", STRINGS)
