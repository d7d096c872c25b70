"""What a worker is told about itself, and its random numbers: torch's, to the bit.

Data path: worker start-up, before the first fetch.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

__all__ = ["WorkerSetup", "install_worker_info", "seed_worker"]


class WorkerSetup(NamedTuple):
    """All that the workers of a pool have in common. Sent once a pool; pickled once for all of its workers."""

    dataset: Any
    iterable: bool
    auto_collation: bool
    batch_size: int | None
    collate_fn: Any
    drop_last: bool
    base_seed: int
    worker_init_fn: Any
    num_workers: int
    shared_seed: int | None
    concurrency: int


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed random, torch and numpy as a torch worker does; return the worker's seed.

    Source: ``torch.utils.data._utils.worker._worker_loop``. numpy's seed is mixed by `_generate_state` so that it
    differs from that of `random`, which uses the same generator.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, worker_id))
    return seed


def install_worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make `torch.utils.data.get_worker_info` work in this process."""
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset
    )
