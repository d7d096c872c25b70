"""The number of open file descriptors is constant in the main process and in every worker, for all kinds of batches."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader, Tuning
from tests.helpers.datasets import AsyncNumbers, Numbers

MEMORY = "/memfd:asyncloader (deleted)"


def open_descriptors(pid: int) -> list[str]:
    """The targets of a process's open descriptors, sorted."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        found.append(target.split(":[", maxsplit=1)[0])
    return sorted(found)


class Varied(Dataset[Any]):
    """Strings, many small tensors, and sizes that grow over the first three quarters."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        width = 50 * min(index, self.n * 3 // 4)
        return {"s": "x" * (index % 100), "many": [torch.tensor(index)] * 10, "grows": torch.zeros(width), "o": {index}}


def first(samples: list[Any]) -> Any:
    return samples[0]


CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "small batches": (Numbers(10_000), {}, 10_000),
    "strings and growing sizes": (Varied(1500), {"collate_fn": first}, 1500),
    "bounded ring": (Varied(800), {"collate_fn": first, "tuning": Tuning(ring_bytes=1 << 18)}, 800),
    "async dataset": (AsyncNumbers(1500), {}, 1500),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("hold", [False, True], ids=["drop", "hold"])
def test_descriptors_after_many_batches(name: str, hold: bool) -> None:
    """The facade: after batch 10 and shortly before the end, the same descriptors are open, here and in each worker."""
    dataset, options, n = CASES[name]
    batches: Any = iter(DataLoader[Any](dataset, num_workers=2, prefetch_factor=2, **options))
    workers = [process.pid for process in batches._workers]
    held: list[Any] = []
    early: list[list[str]] = []
    main_early = 0
    for position in range(n - 8):
        batch = next(batches)
        if hold and position >= n - 200:
            held.append(batch)
        del batch
        if position == 10:
            early = [open_descriptors(pid) for pid in workers]
            main_early = len(open_descriptors(os.getpid()))
    gc.collect()
    for before, now in zip(early, [open_descriptors(pid) for pid in workers], strict=True):
        assert [target for target in now if target != MEMORY] == [target for target in before if target != MEMORY]
        # a worker may be observed while it holds and maps a segment for a batch that is larger than its slot
        assert now.count(MEMORY) <= before.count(MEMORY) + 2 * ("tuning" in options)
    grown = len(open_descriptors(os.getpid())) - main_early
    # A batch that is larger than a slot travels in a segment of its own: at most one per credit (2 x 2), and a few may
    # be lent as they are. Never one per batch.
    assert grown <= (4 + 16 if "tuning" in options else 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_worker_inherits_nothing_of_its_siblings() -> None:
    """A forked worker keeps no socket that the main process holds for other workers, of its pool or another."""
    before = open_descriptors(os.getpid()).count("socket")
    one: Any = iter(DataLoader[Any](Numbers(50), num_workers=3, multiprocessing_context="fork"))
    two: Any = iter(DataLoader[Any](Numbers(50), num_workers=1, multiprocessing_context="fork"))
    for _ in range(3):
        next(one)  # a batch of each worker: all of them are past their start
    next(two)
    counts = [open_descriptors(process.pid).count("socket") for process in [*one._workers, *two._workers]]
    assert counts == [before + 1] * 4  # each worker has its own end
