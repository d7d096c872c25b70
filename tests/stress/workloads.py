"""Datasets, collations and loaders of the cases. A sample's content is a function of its index, and so can be checked.

Beside the content a sample carries random numbers: in seeded mode they too must be the same whatever happens to the
workers. All is at module level, because some workers are spawned.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader, sample_rng
from asyncloader.options.objects import grouped
from tests.stress.faults import FaultPlan
from tests.stress.schedule import START, STRIDE, Case

Sample = dict[str, Any]

LAG_S = 0.004
_PERIOD = 251
_TILE = (torch.arange(_PERIOD, dtype=torch.int64) * 31 % _PERIOD).to(torch.uint8)


def content(index: int, nbytes: int) -> torch.Tensor:
    """The bytes of a sample: a pattern that begins where its index says."""
    first = index * 17 % _PERIOD
    whole = _TILE.repeat((first + nbytes) // _PERIOD + 1)
    return whole[first : first + nbytes].clone()


class Maker:
    """Makes samples. What datasets of all kinds have in common.

    Args:
        case: the case.
        plan: its faults in workers.
    """

    def __init__(self, case: Case, plan: FaultPlan) -> None:
        self.case = case
        self.plan = plan
        self._ballast: list[bytearray] = []

    def nbytes(self, index: int) -> int:
        """Size of a sample."""
        largest, place = self.case.sample_bytes, index % STRIDE
        if self.case.sizes == "even":
            return largest
        if self.case.sizes == "mixed":
            return largest * (place * 7 % 11) // 10
        return largest * min(place + 1, 30) // 30

    def make(self, index: int, *, own: bool = False) -> Sample:
        """The sample, with draws from the global generators, or from its own."""
        case = self.case
        self.plan.visit(index)
        if case.lag and index % case.lag == 1:
            threading.Event().wait(LAG_S)  # a slow sample
        if case.ballast:
            self._ballast.append(bytearray(b"\1") * case.ballast)
        return {"index": index, "data": content(index, self.nbytes(index)), "draws": _draws(own=own or case.own_draws)}


def _draws(*, own: bool) -> torch.Tensor:
    if own:
        rng = sample_rng()
        numbers = [float(torch.rand((), generator=rng.torch)), rng.random.random(), float(rng.numpy.random())]
    else:
        numbers = [float(torch.rand(())), random.random(), float(np.random.random())]
    return torch.tensor(numbers, dtype=torch.float64)


class Rows(Maker, Dataset[Any]):
    """A map dataset."""

    def __len__(self) -> int:
        return self.case.length

    def __getitem__(self, index: int) -> Sample:
        return self.make(index)


class AsyncRows(Maker, Dataset[Any]):
    """A map dataset whose samples are made concurrently."""

    def __len__(self) -> int:
        return self.case.length

    async def __getitem__(self, index: int) -> Sample:
        return self.make(index, own=True)


class Stream(Maker, IterableDataset[Any]):
    """A stream without a state, of which each worker reads its share."""

    def __iter__(self) -> Iterator[Sample]:
        worker = _worker()
        return (self.make(worker * STRIDE + place) for place in range(self.case.shares[worker]))


class AsyncStream(Maker):
    """The asynchronous kind of `Stream`: several of its batches are made at a time."""

    async def __aiter__(self) -> AsyncIterator[Sample]:
        worker = _worker()
        for place in range(self.case.shares[worker]):
            await asyncio.sleep(0)
            yield self.make(worker * STRIDE + place, own=True)


class StatefulStream(Maker, IterableDataset[Any]):
    """A stream that can be resumed."""

    def __iter__(self) -> Iterator[Sample]:
        return Places(self, _worker())


class Places:
    """The iterator of a stateful stream. Goes on after an error, with the next sample."""

    def __init__(self, maker: Maker, worker: int) -> None:
        self._maker, self._worker = maker, worker
        self._place = 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self._place >= self._maker.case.shares[self._worker]:
            raise StopIteration
        self._place += 1
        return self._maker.make(self._worker * STRIDE + self._place - 1)

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


def _worker() -> int:
    info = get_worker_info()
    assert info is not None
    return int(info.id)


DATASETS: dict[str, Any] = {
    "map": Rows,
    "async": AsyncRows,
    "stream": Stream,
    "async stream": AsyncStream,
    "stateful": StatefulStream,
}


def make_dataset(case: Case, plan: FaultPlan) -> Any:
    """The case's dataset."""
    return DATASETS[case.workload](case, plan)


# ------------------------------------------------------------------------------------------- batches


def cat(samples: list[Sample]) -> dict[str, Any]:
    """A collation of samples of different sizes."""
    return {
        "index": torch.tensor([sample["index"] for sample in samples]),
        "sizes": torch.tensor([len(sample["data"]) for sample in samples]),
        "data": torch.cat([sample["data"] for sample in samples]),
        "draws": torch.stack([sample["draws"] for sample in samples]),
    }


def objects(samples: list[Sample]) -> list[Any]:
    """A collation that leaves nothing for shared memory."""
    return [(sample["index"], bytes(sample["data"].tolist()), tuple(sample["draws"].tolist())) for sample in samples]


COLLATES: dict[str, Any] = {"default": default_collate, "cat": cat, "objects": objects}


def samples_of(case: Case, batch: Any) -> list[tuple[int, torch.Tensor, tuple[float, ...]]]:
    """Index, bytes and draws of each sample of a batch."""
    if case.collate == "objects":
        return [(i, torch.tensor(list(data), dtype=torch.uint8), draws) for i, data, draws in batch]
    indices, draws = batch["index"].tolist(), [tuple(row) for row in batch["draws"].tolist()]
    datas = batch["data"].split(batch["sizes"].tolist()) if case.collate == "cat" else list(batch["data"])
    return list(zip(indices, datas, draws, strict=True))


def substitute(index: int, error: BaseException) -> Sample:
    """In place of a sample that raised: an empty one that carries the index, negated."""
    assert isinstance(error, Exception)
    return {"index": -1 - index, "data": torch.empty(0, dtype=torch.uint8), "draws": torch.zeros(3).double()}


# ------------------------------------------------------------------------------------------- loaders


class InOrder:
    """A sampler of torch mode: an order that is fixed beforehand."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def order_of(case: Case) -> list[int]:
    """The order of a map dataset in torch mode."""
    order = list(range(case.length))
    if case.shuffle:
        random.Random(case.seed).shuffle(order)
    return order


class Starter:
    """A `worker_init_fn`: lets faults strike when a worker begins."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    def __call__(self, worker: int) -> None:
        self._plan.visit(START - worker)


def options(case: Case) -> dict[str, Any]:
    """The loader's arguments, without the dataset. Those that are at their defaults are left out."""
    found: dict[str, Any] = {
        "batch_size": case.batch_size,
        "collate_fn": COLLATES[case.collate],
        "num_workers": case.workers,
        "prefetch_factor": case.prefetch,
        "multiprocessing_context": None if case.method == "threads" else case.method,
        "workers": "threads" if case.method == "threads" else None,
        "in_order": case.in_order,
        "persistent_workers": case.persistent,
        "ring_bytes": case.ring_bytes,
        "snapshot_every_n_steps": case.snapshot_every,
        "allow_replay": case.allow_replay,
    }
    if case.seeded:
        found["seed"] = case.seed % 1000
        if not case.streams:
            found |= {"shuffle": case.shuffle, "reorder_window": case.reorder_window}
    elif not case.streams:
        found["sampler"] = InOrder(order_of(case))
    handling: dict[str, Any] = {
        "on_error": substitute if case.on_error == "callable" else case.on_error,
        "max_skipped_samples": case.max_skipped_samples,
        "worker_timeout": case.worker_timeout,
        "timeout": case.timeout,
        "max_worker_restarts": case.max_worker_restarts,
        "worker_memory_limit": case.worker_memory_limit,
    }
    defaults = Case(0, "", "", "")
    return found | {name: value for name, value in handling.items() if getattr(case, name) != getattr(defaults, name)}


def make_loader(case: Case, dataset: Any, **changed: Any) -> Any:
    """The case's loader over a dataset, with these options changed."""
    kind = changed.pop("loader", case.loader)
    arguments = grouped(options(case) | {"worker_init_fn": Starter(dataset.plan)} | changed)
    return DataLoader(dataset, **arguments) if kind == "sync" else AsyncDataLoader(dataset, **arguments)
