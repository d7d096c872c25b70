"""The options of samples in flight, and how many batches a worker has in hand for them. Pure.

Data path: options -> [flight_options] -> epoch_plan -> scheduler, workers.

A worker has `prefetch_factor` batches in hand, as torch's. Where it fetches samples concurrently, it has as many as it
takes to keep `concurrency` samples in flight (or `fetch_threads` threads at work) while one batch more is finished and
waits: the slowest sample of a batch then stops no other batch's reads. How much memory they may take is `rings.py`'s.
"""

from __future__ import annotations

from typing import Any

import torch.utils.data

from asyncloader.workers.cursor import is_stateful
from asyncloader.workers.decoding import check_decode
from asyncloader.workers.fetch import is_async_dataset, is_concurrent
from asyncloader.workers.seeded_fetch import fetches_batches

__all__ = ["check_flight_options", "most_credits"]


def check_flight_options(
    *, concurrency: Any, fetch_threads: Any, decode: Any, decode_threads: Any, dataset: Any, iterable: bool
) -> None:
    """Check the options.

    Raises:
        TypeError, ValueError: one is out of range, or does not go with the dataset.
    """
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ValueError(f"concurrency should be a positive integer, but got concurrency={concurrency!r}")
    if not isinstance(fetch_threads, int) or isinstance(fetch_threads, bool) or fetch_threads < 0:
        raise ValueError(
            f"fetch_threads should be a number of threads, 0 to fetch without, but got fetch_threads={fetch_threads!r}"
        )
    check_decode(decode, decode_threads)
    if not fetch_threads:
        return
    if iterable:
        raise ValueError(
            f"fetch_threads={fetch_threads} needs a map dataset: an iterable one gives its samples one after the "
            "other, and no second thread can be at the next one. Raise num_workers, or give it an async __aiter__ that "
            "reads ahead"
        )
    if is_async_dataset(dataset):
        raise ValueError(
            f"fetch_threads={fetch_threads} is for blocking datasets, but this one's samples are awaited: an event "
            "loop keeps `concurrency` of them in flight without threads. Leave fetch_threads at 0"
        )


def most_credits(
    spec: torch.utils.data.DataLoader[Any], concurrency: int, fetch_threads: int, *, iterable: bool
) -> int:
    """Batches that may be in hand at a time for one copy of the dataset, however small they are.

    `prefetch_factor` at least (1 without workers). Not more for streams, which are read one sample after the other; for
    datasets with a state of their own, which would be saved further ahead; and where batches have no known size.
    """
    least: int = spec.prefetch_factor or 1
    dataset: Any = spec.dataset
    in_flight: int = fetch_threads or concurrency
    if iterable or not is_concurrent(dataset, fetch_threads) or is_stateful(dataset):
        return least
    size: Any = spec.batch_size if spec.batch_sampler is None else getattr(spec.batch_sampler, "batch_size", None)
    if spec.batch_sampler is None and spec.batch_size is None:
        size = 1
    if not isinstance(size, int) or size < 1:
        return least
    if fetch_threads and spec.batch_sampler is not None and fetches_batches(dataset):
        size = 1  # a thread makes a whole batch
    batches: int = -(-in_flight // size)
    return max(least, batches + 1)
