"""What a worker is told about itself, and its random numbers: torch's, to the bit.

Data path: worker start-up, before the first fetch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.sample_errors import ErrorPolicy

__all__ = [
    "EpochStart",
    "Links",
    "SeededSetup",
    "WorkerSetup",
    "install_worker_info",
    "seed_worker",
]


class EpochStart(NamedTuple):
    """What one worker begins an epoch with.

    Attributes:
        shared_seed: the seed that all workers and ranks share, for torch's datapipes; None for other datasets.
        epoch: its number.
        told: whether the consumer's copy of the dataset was told it: always in seeded mode, else if the user did.
        cursor: where its copy of the dataset stood; None for the beginning.
        skip: batches to be read and dropped after that.
        made: batches that were made until then, where `skip` counts those that raised, too: they raise again, and are
            dropped again. None: none raised.
        stream_key: seed of the worker's shuffle buffer, where the main process assigns shards.
    """

    shared_seed: int | None = None
    epoch: int = 0
    told: bool = False
    cursor: Cursor | None = None
    skip: int = 0
    made: int | None = None
    stream_key: int = 0


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
    concurrency: int
    starts: Sequence[EpochStart]
    """One a worker, for the first epoch."""
    snapshot_every: int
    """A stateful dataset is asked for its state every so many batches; 0: never."""
    seeded: SeededSetup | None = None
    """None in torch mode."""
    attachment: int = 0
    """The pool's number for the epoch in which the worker begins; more than 0 for a replacement in a later one."""
    memory_limit: int | None = None
    """Bytes of private memory that a worker may grow by before it is replaced."""
    handover: bytes = b""
    """The random numbers' state of the worker that this one replaces, if that could still give it."""
    replays: bool = False
    """A stream without a state may be read again from its beginning."""
    policy: ErrorPolicy | None = None
    """What becomes of samples that raise; None: they fail their batch."""
    fetch_threads: int = 0
    """Threads that fetch the samples of a blocking map dataset; 0: one sample after the other."""
    decode: Any = None
    """From a sample as it was read to one as it is collated; None: they are the same."""
    decode_threads: int = 0
    """Threads for that, where samples are awaited or fetched by threads; 0: inline."""


class SeededSetup(NamedTuple):
    """What seeded mode adds for the workers.

    Attributes:
        seed: the loader's.
        replicas: the difference of the positions of a batch's neighbouring samples.
        first_stream: number of worker 0's stream among those of all ranks, for iterable datasets.
        seed_collate: whether collation is the user's, and may draw random numbers.
    """

    seed: int
    replicas: int
    first_stream: int
    seed_collate: bool


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


class Links(NamedTuple):
    """The descriptors that a worker shares with the main process; each an `InheritedFd`.

    Attributes:
        control: the worker's end of the control socket.
        lifeline: the pipe whose end ends the worker.
        stacks: the pipe into which it writes what it is doing.
        parent: the main process's pidfd, None where the system has none.
    """

    control: Any
    lifeline: Any
    stacks: Any
    parent: Any
