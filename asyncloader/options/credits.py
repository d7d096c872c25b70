"""Computes how many batches a worker may have outstanding.

Data path: options -> [credits] -> epoch_config -> scheduler, pool.

In torch that is `prefetch_factor`. A worker that fetches samples concurrently gets enough batches to keep `concurrency`
samples in flight (or its threads busy), plus one that is finished and waits, so that the slowest sample of
a batch does not stall other batches' reads. A worker of a service gets two more, for tasks and batches that are on the
way. `workers/memory/ring_manager.py` limits their memory.
"""

from __future__ import annotations

from typing import Any

from asyncloader.service.client.remote_dataset import RemoteDataset
from asyncloader.workers.fetch.dataset_kinds import fetches_batches

_ON_THE_WAY = 2


def most_credits(dataset: Any, batch_size: object, *, least: int, concurrency: int, threads: int) -> int:
    """Return the most batches that a copy of the dataset may have outstanding, while they are small.

    Args:
        dataset: the dataset.
        batch_size: samples in a batch. Anything but a positive integer counts as unknown.
        least: batches that a copy may have outstanding, however large they are.
        concurrency: samples that a copy fetches at a time. 0 for datasets that get no more than the least: streams,
            which are read one sample after the other, and datasets with a state of their own, which would be saved
            further ahead.
        threads: threads that fetch these samples; 0: they are awaited.
    """
    most = least
    if concurrency and isinstance(batch_size, int) and batch_size >= 1:
        if threads and fetches_batches(dataset):
            batch_size = 1  # one thread fetches a whole batch
        most = max(least, -(-concurrency // batch_size) + 1)
    return most + (_ON_THE_WAY if isinstance(dataset, RemoteDataset) and dataset.service.remote else 0)
