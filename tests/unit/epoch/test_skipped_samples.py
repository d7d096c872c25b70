from __future__ import annotations

import pickle

import pytest

from asyncloader.base.events import SkippedSample
from asyncloader.epoch.quarantine import SkippedSampleLog
from asyncloader.errors import TooManySkippedSamples
from asyncloader.telemetry.statistics import Statistics


def bad(*indices: int) -> list[SkippedSample]:
    return [SkippedSample(index, None, 1, 99, f"ValueError: {index}", "", "skipped", None) for index in indices]


def test_the_limit_may_be_reached() -> None:
    """`limit` samples may raise; one more is too many, and the error has the limit and the last sample."""
    log = SkippedSampleLog(3, Statistics())
    log.add(bad(0, 1, 2))
    with pytest.raises(TooManySkippedSamples, match=r"max_skipped_samples=3 .* index 7, ValueError: 7") as caught:
        log.add(bad(7))
    assert caught.value.limit == 3


def test_the_batch_beyond_the_limit_is_recorded_whole() -> None:
    """All samples of that batch are in the log afterwards."""
    log = SkippedSampleLog(1, Statistics())
    with pytest.raises(TooManySkippedSamples, match="index 3"):
        log.add(bad(1, 2, 3))
    assert log.samples == bad(1, 2, 3)


def test_the_error_pickles() -> None:
    """The unpickled error has the same type and text."""
    log = SkippedSampleLog(0, Statistics())
    with pytest.raises(TooManySkippedSamples) as caught:
        log.add(bad(1))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (TooManySkippedSamples, str(caught.value))
