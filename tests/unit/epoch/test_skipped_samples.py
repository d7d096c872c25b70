from __future__ import annotations

import pickle

import pytest

from asyncloader.epoch.quarantine import SkippedSampleLog
from asyncloader.errors import TooManySkippedSamples
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.sample_errors import SkippedSample


def bad(*indices: int) -> list[SkippedSample]:
    return [SkippedSample(index, None, 1, 99, f"ValueError: {index}", "", "skipped", None) for index in indices]


def test_samples_are_kept_in_the_order_of_their_batches() -> None:
    """Each record is kept unchanged, and none is lost."""
    log = SkippedSampleLog(10, Statistics())
    assert log.samples == []
    log.add(bad(5, 3))
    log.add([])
    log.add(bad(4))
    assert log.samples == bad(5, 3, 4)


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


def test_none_at_all_may_raise() -> None:
    """With a limit of 0 the first sample is too many; an empty list of records is not."""
    log = SkippedSampleLog(0, Statistics())
    log.add([])
    with pytest.raises(TooManySkippedSamples, match="max_skipped_samples=0"):
        log.add(bad(1))


def test_without_a_limit_there_is_no_end() -> None:
    """With a limit of None any number of samples may raise."""
    log = SkippedSampleLog(None, Statistics())
    for start in range(0, 5000, 100):
        log.add(bad(*range(start, start + 100)))
    assert [record.index for record in log.samples] == list(range(5000))


def test_the_error_pickles() -> None:
    """The unpickled error has the same type and text."""
    log = SkippedSampleLog(0, Statistics())
    with pytest.raises(TooManySkippedSamples) as caught:
        log.add(bad(1))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (TooManySkippedSamples, str(caught.value))
