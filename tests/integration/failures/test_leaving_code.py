"""The user's code raises SystemExit, KeyboardInterrupt or GeneratorExit: wherever it does, the consumer gets an error.

Without workers the exception itself, as torch raises it. A worker process ends by it, which is torch's RuntimeError. In
a worker thread it would end nothing but the thread: it is that batch's error, and the thread goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import pytest
from torch.utils.data import Dataset, IterableDataset, default_collate

from asyncloader import WorkerDied
from tests.helpers.seeded_runs import Stepwise

LEAVING = [SystemExit, KeyboardInterrupt, GeneratorExit]
WAYS: dict[str, dict[str, Any]] = {
    "threads": {"num_workers": 1, "workers": "threads"},
    "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "inline": {},
}


class Leaving:
    """Raises the error at this place, of the number 3 if that is a sample's."""

    def __init__(self, error: type[BaseException], at: str) -> None:
        self.error, self.at = error, at

    def __len__(self) -> int:
        return 6

    def leave(self, at: str, number: int = 3) -> None:
        if at == self.at and number == 3:
            raise self.error(f"at {at}")

    def sample(self, number: int) -> int:
        self.leave("sample", number)
        return number

    def decode(self, number: int) -> int:
        self.leave("decode", number)
        return number

    def collate(self, samples: list[int]) -> Any:
        self.leave("collate", samples[-1])
        return default_collate(samples)

    def init(self, worker_id: int) -> None:
        self.leave("init")

    def state_dict(self) -> dict[str, Any]:
        self.leave("state")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Samples(Leaving, Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return self.sample(index)


class AsyncSamples(Leaving, Dataset[Any]):
    async def __getitem__(self, index: int) -> int:
        return self.sample(index)


class Entered(AsyncSamples):
    async def __aenter__(self) -> Self:
        self.leave("aenter")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Stream(Leaving, IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        self.leave("iter")
        return map(self.sample, range(6))


class AsyncStream(Leaving):
    def __aiter__(self) -> AsyncIterator[int]:
        self.leave("iter")
        return self._samples()

    async def _samples(self) -> AsyncIterator[int]:
        for number in range(6):
            yield self.sample(number)


Made = Callable[[type[BaseException], str], Leaving]
PLACES: list[tuple[Made, str]] = [
    *((Samples, at) for at in ("sample", "decode", "collate", "init", "state")),
    *((AsyncSamples, at) for at in ("sample", "decode", "collate", "init")),
    (Entered, "aenter"),
    *((Stream, at) for at in ("sample", "decode", "collate", "init", "iter", "state")),
    *((AsyncStream, at) for at in ("sample", "decode", "collate", "init", "iter")),
]
STARTING = ("init", "aenter", "iter", "state")


# Each error wherever one is cheap, and the exit that is meant, of a process.
CASES: list[Any] = [
    *((error, way, *place) for error in LEAVING for way in ("threads", "inline") for place in PLACES),
    *((SystemExit, "fork", *place) for place in PLACES),
    (KeyboardInterrupt, "fork", AsyncSamples, "sample"),
    (GeneratorExit, "fork", Entered, "aenter"),
    pytest.param(SystemExit, "spawn", AsyncSamples, "sample", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("error", "way", "make", "at"), CASES)
def test_code_that_leaves(
    error: type[BaseException], way: str, make: Made, at: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The batches before come, where it was no part of the start, and in a thread all but the one that failed. Without
    workers that is made again.
    """
    dataset = make(error, at)
    options: dict[str, Any] = {"batch_size": 2}
    if way != "inline":
        # One at a time: a process that ends takes the batches with it that it has begun.
        options |= {"prefetch_factor": 1, "worker_init_fn": dataset.init}
    with Stepwise("sync", dataset, collate_fn=dataset.collate, **options, **WAYS[way]) as run:
        if way == "inline" and at == "init":
            assert len(run.epoch()) == 3
            return
        if at not in STARTING:
            run.begin()
            assert run.step().tolist() == [0, 1]
        expected: Any = error if way == "inline" else RuntimeError if way == "threads" else WorkerDied
        named = f"raised {error.__name__}: at {at}"
        if error is GeneratorExit and at == "aenter":  # it would close the coroutines that wait
            expected = RuntimeError
        elif way != "threads":
            named = f"at {at}" if way == "inline" else "exit code 1"
        with pytest.raises(expected, match=named):
            (run.epoch if at in STARTING else run.step)()
        if way == "threads" and at in ("decode", "collate") and make is not Stream:
            assert [batch.tolist() for batch in run.rest()] == [[4, 5]]
        elif way == "inline" and at in ("sample", "decode", "collate") and make not in (Stream, AsyncStream):
            with pytest.raises(expected, match=named):  # as Ctrl-C may come anywhere, it costs no batch
                run.step()
    capfd.readouterr()  # processes print the error's traceback
