"""An epoch that could not begin has not begun: whatever fails before the first sample, another loop begins the
epoch, at the loaded position, without workers also a further `next()`. Until then the state is the one that was loaded.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler

from asyncloader import JoinSequences, Mixture, PackedLoader, RemoteIterableDataset, RemoteMapDataset
from tests.helpers.running import BOTH
from tests.helpers.seeded_runs import Stepwise

SAMPLES = 12


class Fault:
    """Raises in any process, and hides the shards, while it is `on`."""

    def __init__(self, folder: Path) -> None:
        self.file, self.shards, self.away = folder / "fault", folder / "shards", folder / "away"

    def __call__(self, *_: Any) -> None:
        if self.file.exists():
            raise ConnectionError("not yet")

    def turn(self, *, on: bool) -> None:
        if on:
            self.file.touch()
        else:
            self.file.unlink(missing_ok=True)
        before, after = (self.shards, self.away) if on else (self.away, self.shards)
        if before.exists():
            before.rename(after)


class Drawn(Dataset[Any]):
    """Samples with a random number, unless it is the training program's."""

    resumed = False  # in torch mode a worker's generators do not go on behind a batch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        own = torch.utils.data.get_worker_info() is not None and not self.resumed
        return torch.tensor([float(index), torch.rand(1).item() if own else 0.0])


class Entered(Dataset[Any]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return SAMPLES

    async def __getitem__(self, index: int) -> int:
        return index

    async def __aenter__(self) -> Self:
        self.fault()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Counting:
    """An iterator with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == SAMPLES:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class AwaitedCounting(Counting):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        if self.at == SAMPLES:
            raise StopAsyncIteration
        return next(self)


class Stream(IterableDataset[int]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __iter__(self) -> Iterator[int]:
        self.fault()
        return Counting()


class AsyncStream:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __aiter__(self) -> AsyncIterator[int]:
        self.fault()
        return AwaitedCounting()


class Order(Sampler[int]):
    """Fails where it is asked for its iterator; or, as a generator, for the first index."""

    def __init__(self, fault: Fault, *, late: bool) -> None:
        self.fault, self.late = fault, late

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if not self.late:
            self.fault()
        return self._indices()

    def _indices(self) -> Iterator[int]:
        self.fault()
        yield from reversed(range(SAMPLES))


class AwaitedOrder(Order):
    __iter__ = Sampler.__iter__

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in self._indices():
            yield index


def decoded(sample: Any) -> torch.Tensor:
    return torch.tensor(sample["id"])


def sequence(sample: Any) -> dict[str, torch.Tensor]:
    return {"tokens": torch.full((sample["id"] % 3 + 1,), sample["id"])}


def shards(fault: Fault) -> str:
    if not fault.shards.exists():
        fault.shards.mkdir()
        for number in range(3):
            lines = (json.dumps({"id": number * 4 + each}) for each in range(4))
            (fault.shards / f"{number}.jsonl").write_text("\n".join(lines))
    return f"{fault.shards}/*.jsonl"


def streams(fault: Fault, number: int | None = 2) -> Any:
    return RemoteIterableDataset(shards(fault), streams=number)


CASES: dict[str, Callable[[Fault], tuple[Any, dict[str, Any]]]] = {
    "worker_init_fn": lambda fault: (Drawn(), {"worker_init_fn": fault, "sampler": RandomSampler(range(SAMPLES))}),
    "aenter": lambda fault: (Entered(fault), {}),
    "iter": lambda fault: (Stream(fault), {}),
    "aiter": lambda fault: (AsyncStream(fault), {}),
    "sampler": lambda fault: (Drawn(), {"sampler": Order(fault, late=False)}),
    "first index": lambda fault: (Drawn(), {"sampler": Order(fault, late=True)}),
    "async sampler": lambda fault: (Drawn(), {"sampler": AwaitedOrder(fault, late=True)}),
    "assigned shards": lambda fault: (streams(fault, None), {"decode": decoded}),
    "fixed streams": lambda fault: (streams(fault), {"decode": decoded}),
    "mixture": lambda fault: (Mixture([streams(fault)], [1]), {"decode": decoded}),
    "packed": lambda fault: (streams(fault), {"decode": sequence, "collate_fn": JoinSequences(7), "batch_size": 5}),
    "random access": lambda fault: (RemoteMapDataset(shards(fault)), {"decode": decoded}),
}
SEEDED = "fixed streams", "mixture", "packed"


class Run(Stepwise):
    """Iterates over a case's loader, or over its rows."""

    def __init__(self, kind: str, case: str, fault: Fault, options: dict[str, Any], *, resumed: bool) -> None:
        dataset, given = CASES[case](fault)
        if not options["num_workers"]:
            given.pop("worker_init_fn", None)
        if isinstance(dataset, Drawn):
            dataset.resumed = resumed
        super().__init__(kind, dataset, **{"batch_size": 2, **given, **options})
        self.batches: Any = PackedLoader(self.loader) if case == "packed" else self.loader
        self.kind = kind

    def begin(self) -> Any:
        self.iterator = iter(self.batches) if self.kind == "sync" else aiter(self.batches)
        return self.iterator

    def first(self, drawn: torch.Tensor | None) -> Any:
        """Return the first batch; of a new iterator, if the generator's state for that is given."""
        if drawn is not None:
            torch.set_rng_state(drawn)
            self.begin()
        return self.step()

    def state(self) -> Any:
        return self.call(self.batches.state_dict)

    def step(self, iterator: Any = None) -> Any:
        batch = super().step(iterator)
        return (batch["tokens"] if isinstance(batch, dict) else batch).tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", ["beginning", "middle", "end"])
@pytest.mark.parametrize("again", ["next", "loop"])
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("mode", ["seeded", "torch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_lost(tmp_path: Path, case: str, at: str, again: str, kind: str, mode: str, workers: int) -> None:
    """Twice the epoch cannot begin. Then it gives the batches that were to come, with their random numbers."""
    if case in SEEDED:
        mode = "seeded"
    if case == "random access":
        at = "beginning"  # later its shards are known
    fault = Fault(tmp_path)
    options: dict[str, Any] = {"num_workers": workers, "seed": 3 if mode == "seeded" else None}
    if workers or case == "worker_init_fn":
        options |= {"num_workers": 1, "multiprocessing_context": "fork"}
    run_of = partial(Run, kind, case, fault, options, resumed=at == "middle" and mode == "torch")
    with run_of() as run:
        drawn, expected, state = torch.get_rng_state(), run.epoch(), None
        if at == "end":
            state, drawn = run.state(), torch.get_rng_state()
            expected = run.epoch()
    if at == "middle":
        torch.set_rng_state(drawn)
        with run_of() as run:
            run.begin()
            run.take(2)
            state, expected = run.state(), expected[2:]
    with run_of() as run:
        if state is not None:
            run.call(run.batches.load_state_dict, state)
        fault.turn(on=True)
        for _ in range(2):
            with pytest.raises((ConnectionError, ValueError, StopIteration)):
                run.first(drawn if again == "loop" or run.iterator is None else None)
        if case != "random access":  # whose state has its length
            between = run.state()
            begun = between.get("loader", between)
            assert between == state if state is not None else (begun["step"], begun["finished"]) == (0, False)
        fault.turn(on=False)
        # As in torch: an iterator ends with its workers' error, and with that of the batch sampler's generator.
        ended = options["num_workers"] or (mode == "torch" and case in ("sampler", "first index", "random access"))
        if again == "next" and run.iterator is not None and not ended:
            assert run.rest() == expected
        else:
            torch.set_rng_state(drawn)
            assert run.epoch() == expected
