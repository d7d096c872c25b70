"""Computes how many batches a worker has outstanding.

Data path: options -> [credits] -> scheduler, pool.

In torch that is `prefetch_factor`. A worker that fetches samples concurrently gets enough batches to keep `concurrency`
samples in flight (or its threads busy), plus one that is finished and waits, so that the slowest sample of
a batch does not stall other batches' reads. A worker of a service gets two more, for tasks and batches that are on the
way. `workers/memory/ring_manager.py` limits their memory.
"""

from __future__ import annotations

from asyncloader.options.epoch_config import EpochConfig
from asyncloader.service.client.remote_dataset import ServedDataset
from asyncloader.workers.fetch.dataset_kinds import fetches_batches
from asyncloader.workers.fetch.dataset_state import is_stateful

_ON_THE_WAY = 2


def least_credits(config: EpochConfig) -> int:
    """Batches that one copy of the dataset may have outstanding in any case: `prefetch_factor`; 1 without workers."""
    return config.prefetch_factor or 1


def most_credits(config: EpochConfig) -> int:
    """Most batches that one copy of the dataset may have outstanding, while they are small."""
    remote = isinstance(config.dataset, ServedDataset) and config.dataset.service.remote
    return _most_in_work(config) + (_ON_THE_WAY if remote else 0)


def _most_in_work(config: EpochConfig) -> int:
    """Most batches that are in work or ready, while they are small.

    Not more than the least for streams, which are read one sample after the other; for datasets with a state of their
    own, which would be saved further ahead; and for batches of unknown size.
    """
    least, threads = least_credits(config), config.fetch_threads
    if config.iterable or not config.concurrent or is_stateful(config.dataset):
        return least
    size: object = getattr(config.batch_sampler, "batch_size", None) if config.auto_collation else 1
    if not isinstance(size, int) or size < 1:
        return least
    if threads and config.auto_collation and fetches_batches(config.dataset):
        size = 1  # one thread fetches a whole batch
    return max(least, -(-(threads or config.concurrency) // size) + 1)
