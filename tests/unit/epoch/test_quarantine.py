from __future__ import annotations

from typing import Any

import pytest

from asyncloader.base.events import Poisoned, PositionedIndex, SkippedSample, Task
from asyncloader.epoch.quarantine import settle
from asyncloader.errors import TaskQuarantined, WorkerDied
from asyncloader.options.declaration import OnError
from asyncloader.workers.fetch.sample_errors import dropped_count


def poisoned(index: Any, trace: str = "") -> Poisoned:
    deaths = WorkerDied(0, 101, -9), WorkerDied(2, 102, 3, trace=trace)
    return Poisoned(Task(1, 7, index), deaths)


def settled(
    index: Any, on_error: OnError, *, batched: bool = True, replicas: int = 1, trace: str = ""
) -> list[SkippedSample]:
    return settle(poisoned(index, trace), on_error, batched=batched, replicas=replicas)


@pytest.mark.parametrize("on_error", ["raise", lambda index, error: index])
@pytest.mark.parametrize("index", [[3, 4], 3])
def test_it_is_raised_with_the_indices_and_the_deaths(index: Any, on_error: OnError) -> None:
    """The error has the sampler's indices, how each worker died, and the stderr of the last. No function is called."""
    with pytest.raises(TaskQuarantined) as caught:
        settled(index, on_error, batched=isinstance(index, list), trace="assertion failed in libfoo")
    assert caught.value.indices == index
    assert caught.value.deaths == ((0, 101, -9), (2, 102, 3))
    assert caught.value.stderr == "assertion failed in libfoo"


def test_skip_leaves_out_the_batch_and_records_each_sample() -> None:
    """No batch is made; each index has a record with the last worker's number, pid and stderr."""
    records = settled([3, 4, 5], "skip", trace="last words")
    assert [record.index for record in records] == [3, 4, 5]
    assert dropped_count(records) == 3
    for record in records:
        assert record.position is None
        assert (record.worker, record.pid, record.action, record.substitute) == (2, 102, "skipped", None)
        assert record.error.startswith("TaskQuarantined: the task for indices [3, 4, 5] killed 2 workers")
        assert record.traceback == "last words"


@pytest.mark.parametrize(
    ("first", "replicas", "positions"), [(40, 1, [40, 41, 42]), (40, 4, [40, 44, 48]), ((40, 47, 49), 1, [40, 47, 49])]
)
def test_records_have_the_samples_positions(first: Any, replicas: int, positions: list[int]) -> None:
    """In seeded mode each record has the sample's position in the global order, of which this rank has every n-th, or
    the samples that `balance` gave it.
    """
    records = settled(PositionedIndex(first, [3, 4, 5]), "skip", replicas=replicas)
    assert [record.position for record in records] == positions
    assert [record.index for record in records] == [3, 4, 5]
    assert dropped_count(records) == 3


@pytest.mark.parametrize("placed", [False, True])
def test_without_batches_a_task_is_one_sample(placed: bool) -> None:
    """With batch_size=None the index is that of one sample, even if it is a tuple."""
    index = (3, 4)
    (record,) = settled(PositionedIndex(6, index) if placed else index, "skip", batched=False)
    assert record.index == index
    assert record.position == (6 if placed else None)


def test_records_are_bounded() -> None:
    """The records' texts are at most as long as `SkippedSample` promises, however much the workers wrote."""
    records = settled(list(range(1000)), "skip", trace="x" * 100_000)
    assert max(len(record.error) for record in records) <= 1000
    assert max(len(record.traceback) for record in records) <= 16_000
