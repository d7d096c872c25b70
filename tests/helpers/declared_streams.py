"""Datasets that say by `loader_streams` that they are a number of streams."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import Recovery
from tests.helpers.seeded_runs import Stepwise

LENGTHS = [7, 3, 11, 0, 6]


class Streams(IterableDataset[Any]):
    """Stateful streams of these lengths. A sample has the stream, its number there, the seed of `get_worker_info`, and
    numbers from the process's generators.
    """

    def __init__(self, lengths: list[int] = LENGTHS, **attributes: Any) -> None:
        self.lengths = lengths
        self.loader_streams: Any = len(lengths)
        self.next = 0
        self.marked = -1
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert (info.num_workers, info.dataset) == (len(self.lengths), self)
        while self.next < self.lengths[info.id]:
            now = get_worker_info()
            assert now is not None
            assert (now.id, now.seed, now.dataset) == (info.id, info.seed, self)
            self.next += 1
            yield self.sample(info)
        self.next = 0

    def sample(self, info: Any) -> torch.Tensor:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return torch.tensor([info.id, self.next - 1, info.seed % 1000, self.marked, *drawn], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Drawless(Streams):
    """Streams that draw from no generator of the process."""

    def sample(self, info: Any) -> torch.Tensor:
        return torch.tensor([info.id, self.next - 1, info.seed % 1000])


class Growing(Streams):
    """Streams of which one takes more memory than is allowed."""

    def sample(self, info: Any) -> torch.Tensor:
        made: torch.Tensor = super().sample(info)
        if (info.id, self.next) == (2, 4):
            vars(self)["held"] = bytearray(os.urandom(1 << 20) * 64)
        return made


def take_around_a_kill(run: Stepwise, before: int) -> list[torch.Tensor]:
    """Begin an epoch, and return its first batches: this number of them before the first worker is killed, and three
    after that.
    """
    run.begin()
    got = run.take(before)
    os.kill(run.iterator._workers[0].pid, signal.SIGKILL)
    return got + run.take(3)


def runs_within(dataset: Any, **options: Any) -> list[list[torch.Tensor]]:
    """An epoch without workers, and an epoch with two of which one leaves, as its memory grows beyond its limit."""
    limited = {"recovery": Recovery(worker_memory_limit=32 << 20), "multiprocessing_context": "fork"}
    runs: list[list[torch.Tensor]] = []
    for workers, more in ((0, {}), (2, limited)):
        torch.manual_seed(3)
        with Stepwise("sync", dataset, num_workers=workers, **options, **more) as run:
            runs.append(run.epoch())
            assert run.loader.stats()["data/worker_retirements"] == (1 if workers else 0)
    return runs


def mark(number: int) -> None:
    """A `worker_init_fn` that draws."""
    info = get_worker_info()
    assert info is not None
    assert info.id == number
    vars(info.dataset)["marked"] = random.randrange(1000)
