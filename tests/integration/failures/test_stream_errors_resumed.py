"""Streams that raise and continue, are saved, resumed, or lose workers: each batch and error is delivered once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import DataLoader, Recovery
from tests.drawn import scaled
from tests.helpers.running import BOTH
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers:
    """A worker's numbers; raises for those in `bad` and continues. Number `kill` kills the process, once."""

    def __init__(self, stream: Stream) -> None:
        info = get_worker_info()
        self.first, self.step = (0, 1) if info is None else (info.id, info.num_workers)
        self.stream, self.at = stream, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        number = self.first + self.at * self.step
        if number >= self.stream.length:
            raise StopIteration
        self.at += 1
        if number == self.stream.kill and not self.stream.mark.exists():
            self.stream.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number in self.stream.bad:
            raise ValueError(f"bad {number}")
        return number


class StatefulNumbers(Numbers):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class AsyncNumbers:
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        try:
            return next(self.numbers)
        except StopIteration:
            raise StopAsyncIteration from None


class Stream(IterableDataset[int]):
    def __init__(
        self, length: int, bad: set[int], *, stateful: bool = False, kill: int = -1, mark: Path = Path("/nowhere")
    ) -> None:
        self.length, self.bad, self.stateful, self.kill, self.mark = length, bad, stateful, kill, mark

    def __iter__(self) -> Iterator[int]:
        return StatefulNumbers(self) if self.stateful else Numbers(self)


class AsyncStream(Stream):
    """An async stream whose state is the dataset's."""

    numbers: StatefulNumbers | None = None
    at = 0

    def __aiter__(self) -> AsyncIterator[int]:
        self.numbers = StatefulNumbers(self)
        self.numbers.at, self.at = self.at, 0
        return AsyncNumbers(self.numbers)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at if self.numbers is None else self.numbers.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def outcomes_and_states(
    kind: str, dataset: Any, state: Any = None, stop: int | None = None, **options: Any
) -> tuple[list[Any], Any]:
    """The batches and errors from a state on, all or the first `stop`, and the state after the last."""
    found: list[Any] = []

    def note(error: Exception) -> None:
        found.append(next(line for line in str(error).splitlines()[::-1] if "bad" in line).split(": ")[-1])
        assert len(found) < 100, found

    with Stepwise(kind, dataset, **options) as run:
        if state is not None:
            run.loader.load_state_dict(state)
        run.begin()
        while len(found) != stop:
            try:
                found.append(run.step().tolist())
            except StopIteration:
                break
            except ValueError as error:
                note(error)
        return found, run.loader.state_dict()


def assert_resumes(kind: str, dataset: Any, stop: int, **options: Any) -> None:
    """The outcomes before a state, followed by those after it, are those of a whole run; but for an error just before
    the state, whose batch is asked for again.
    """
    whole, _ = outcomes_and_states(kind, dataset, **options)
    first, state = outcomes_and_states(kind, dataset, stop=stop, **options)
    rest: list[Any] = []
    if len(first) == stop:  # else it is over
        rest, _ = outcomes_and_states(kind, dataset, state, **options)
        if isinstance(first[-1], str):
            first.pop()
    assert first + rest == whole, (stop, first, rest)


@pytest.mark.parametrize("seed", range(scaled(40)))
def test_drawn_resumes(seed: int) -> None:
    """Outcomes before and after a state make the whole for drawn streams, batch sizes, snapshots and stops."""
    draw = random.Random(seed)
    length = draw.randrange(1, 30)
    bad = {number for number in range(length) if draw.random() < 0.2}
    stateful = draw.random() < 0.6
    dataset = draw.choice([Stream, AsyncStream])(length, bad, stateful=stateful)
    options: dict[str, Any] = {
        "batch_size": draw.choice([1, 2, 3]),
        "num_workers": draw.choice([0, 0, 1, 2]),
        "snapshot_every_n_steps": draw.choice([1, 2, 5]),
        "recovery": Recovery(allow_replay=True),
        "drop_last": draw.random() < 0.2,
    }
    if draw.random() < 0.3:
        options["seed"] = seed
    assert_resumes(draw.choice(BOTH), dataset, draw.randrange(1, 12), **options)


@pytest.mark.parametrize("make", [Stream, AsyncStream])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kill", [1, 4])
def test_a_stream_that_raised_first_is_replaced(kill: int, every: int, make: Any, tmp_path: Path) -> None:
    """A worker that has answered with errors only, and dies, is replaced, because its stream has a state."""
    options: dict[str, Any] = {"batch_size": 1, "num_workers": 1, "seed": 1, "snapshot_every_n_steps": every}
    found, _ = outcomes_and_states(
        "sync", make(6, {0, 2}, stateful=True, kill=kill, mark=tmp_path / "killed"), **options
    )
    assert found == ["bad 0", [1], "bad 2", [3], [4], [5]]
    assert (tmp_path / "killed").exists()


class BadMap(Dataset[int]):
    """Every sample raises, except each tenth."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        if index % 10:
            raise ValueError(f"bad {index}")
        return index


@pytest.mark.parametrize("seed", [None, 1])
def test_failed_batches_leave_nothing_behind(seed: int | None) -> None:
    """The position of an epoch with 180 errors stays as small as that of an epoch without errors."""
    batches = iter(DataLoader[Any](BadMap(), batch_size=1, seed=seed))
    position = batches._epoch.progress  # type: ignore[attr-defined]
    for _ in range(200):
        with contextlib.suppress(ValueError):
            next(batches)
        assert len(position._steps) <= 1
    assert position.state()["step"] == 199  # the last error counts when the next outcome is delivered
    with pytest.raises(StopIteration):
        next(batches)
