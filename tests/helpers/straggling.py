"""A rank whose loader is slow in one stage, among ranks that train in step with it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import Dataset, Sampler, default_collate

from asyncloader.ranks import watch
from tests.helpers.seeded_runs import Stepwise

COST_S = 0.03
"""What a batch of two costs in the slow stage."""
MOST_STEPS = 2000


class Ones(Dataset[torch.Tensor]):
    """Samples that cost `seconds` each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10 * MOST_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(2)


class InOrder(Sampler[int]):
    """Indices that cost `seconds` each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10 * MOST_STEPS

    def __iter__(self) -> Iterator[int]:
        for index in range(len(self)):
            time.sleep(self.seconds)
            yield index


def collate(seconds: float, samples: list[torch.Tensor]) -> Any:
    """Collate, which costs `seconds`."""
    time.sleep(seconds)
    return default_collate(samples)


def decode(seconds: float, sample: torch.Tensor) -> torch.Tensor:
    """Decode, which costs `seconds`."""
    time.sleep(seconds)
    return sample


def options_for(stage: str | None) -> tuple[Dataset[torch.Tensor], dict[str, Any]]:
    """A dataset and a loader's options with which this stage is slow; None: no stage is."""
    options: dict[str, Any] = {"batch_size": 2}
    if stage == "sampler":
        options["sampler"] = InOrder(COST_S / 2)
    elif stage == "collate":
        options["collate_fn"] = partial(collate, COST_S)
    elif stage == "decode":
        options["decode"] = partial(decode, COST_S / 2)
    return Ones(COST_S / 2 if stage == "fetch" else 0.0), options


class Lines(logging.Handler):
    """Keeps the warnings of asyncloader, from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("asyncloader").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("asyncloader").removeHandler(self)


def train(rank: int, straggler: int, stage: str, *, kind: str = "sync", **options: Any) -> tuple[list[str], str]:
    """Train until rank 0 has logged which rank starves. Returns this rank's lines, and `explain()`.

    Args:
        rank: this process's.
        straggler: the rank that is slow.
        stage: in which it is.
        kind: of loader.
        options: the loader's.
    """
    dataset, own = options_for(stage if rank == straggler else None)
    watch._EVERY_S, watch._REST = 0.05, 0
    with Lines() as lines, Stepwise(kind, dataset, **{"num_workers": 1, **own, **options}) as run:
        run.begin()
        for _ in range(MOST_STEPS):
            run.step()
            found = torch.tensor([len(lines.texts)])
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
            if int(found):
                break
        for _ in range(50):  # and once only
            run.step()
            torch.distributed.all_reduce(torch.ones(1))
        return lines.texts, run.loader.explain()


def read_apart(rank: int, steps: list[int | None], *, num_workers: int = 1) -> list[str]:
    """Take a number of steps without the other ranks, and end the loader; None: be killed after a few steps. Returns
    `explain()` in lines.
    """
    watch._EVERY_S, watch._REST = 0.02, 0
    dataset, options = options_for("fetch")
    with Stepwise("sync", dataset, num_workers=num_workers, **options) as run:
        run.begin()
        mine = steps[rank]
        run.take(40 if mine is None else mine)
        if mine is None:
            os.kill(os.getpid(), signal.SIGKILL)
        lines: list[str] = run.loader.explain().splitlines()
        return lines
