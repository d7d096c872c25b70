from __future__ import annotations

from typing import Any

import pytest

from asyncloader.base.events import Poisoned, PositionedIndex, Task
from asyncloader.epoch.quarantine import Quarantine
from asyncloader.errors import TaskQuarantined, WorkerDied
from asyncloader.options.declaration import OnError
from asyncloader.workers.fetch.sample_errors import SkippedSample, dropped_count


def poisoned(index: Any, trace: str = "") -> Poisoned:
    deaths = WorkerDied(0, 101, -9), WorkerDied(2, 102, 3, trace=trace)
    return Poisoned(Task(1, 7, index), deaths)


def settled(
    index: Any, on_error: OnError, *, batched: bool = True, replicas: int = 1, trace: str = ""
) -> tuple[Any, list[SkippedSample]]:
    quarantine = Quarantine(on_error, tuple, batched=batched, replicas=replicas)
    return quarantine.settle(poisoned(index, trace))


class Asked:
    """An `on_error` function that returns ten times the index and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Exception]] = []

    def __call__(self, index: Any, error: Exception) -> Any:
        self.calls.append((index, error))
        return 10 * index


# -------------------------------------------------------------------------------------------------- raise


@pytest.mark.parametrize("index", [[3, 4], 3])
def test_it_is_raised_with_the_indices_and_the_deaths(index: Any) -> None:
    """By default the error has the sampler's indices, how each worker died, and the stderr of the last."""
    with pytest.raises(TaskQuarantined) as caught:
        settled(index, "raise", batched=isinstance(index, list), trace="assertion failed in libfoo")
    assert caught.value.indices == index
    assert caught.value.deaths == ((0, 101, -9), (2, 102, 3))
    assert caught.value.stderr == "assertion failed in libfoo"


# --------------------------------------------------------------------------------------------------- skip


def test_skip_leaves_out_the_batch_and_records_each_sample() -> None:
    """No batch is made; each index has a record with the last worker's number, pid and stderr."""
    batch, records = settled([3, 4, 5], "skip", trace="last words")
    assert batch is None
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
    _, records = settled(PositionedIndex(first, [3, 4, 5]), "skip", replicas=replicas)
    assert [record.position for record in records] == positions
    assert [record.index for record in records] == [3, 4, 5]
    assert dropped_count(records) == 3


@pytest.mark.parametrize("placed", [False, True])
def test_without_batches_a_task_is_one_sample(placed: bool) -> None:
    """With batch_size=None the index is that of one sample, even if it is a tuple."""
    index = (3, 4)
    batch, (record,) = settled(PositionedIndex(6, index) if placed else index, "skip", batched=False)
    assert batch is None
    assert record.index == index
    assert record.position == (6 if placed else None)


def test_records_are_bounded() -> None:
    """The records' texts are at most as long as `SkippedSample` promises, however much the workers wrote."""
    _, records = settled(list(range(1000)), "skip", trace="x" * 100_000)
    assert max(len(record.error) for record in records) <= 1000
    assert max(len(record.traceback) for record in records) <= 16_000


# -------------------------------------------------------------------------------------------------- a function


def test_a_function_gives_substitutes() -> None:
    """The function is called with each index and the error; its results are collated to the batch."""
    ask = Asked()
    batch, records = settled(PositionedIndex(40, [3, 4]), ask)
    assert batch == (30, 40)
    assert [index for index, _ in ask.calls] == [3, 4]
    assert all(isinstance(error, TaskQuarantined) for _, error in ask.calls)
    assert [(record.index, record.position, record.action) for record in records] == [
        (3, 40, "replaced"),
        (4, 41, "replaced"),
    ]
    assert dropped_count(records) == 0


def test_what_the_function_raises_is_raised() -> None:
    """The function may refuse by raising the given error or its own."""

    def refuse(index: int, error: Exception) -> Any:
        if index == 4:
            raise LookupError("no substitute for 4") from error
        return index

    with pytest.raises(LookupError, match="no substitute for 4") as caught:
        settled([3, 4, 5], refuse)
    assert isinstance(caught.value.__cause__, TaskQuarantined)


async def _awaited(index: Any, error: Exception) -> Any:
    return index


class _AwaitedCall:
    async def __call__(self, index: Any, error: Exception) -> Any:
        return index


@pytest.mark.parametrize("ask", [_awaited, _AwaitedCall()], ids=["function", "object"])
def test_a_coroutine_function_cannot_be_asked(ask: OnError) -> None:
    """No worker's event loop could await it here: the quarantine is raised, and no coroutine is left unawaited."""
    with pytest.raises(TaskQuarantined):
        settled([3, 4], ask)
