"""Checks the loaders' options when a loader is made, each one and in combination.

Data path: none. A failed check raises ValueError or TypeError with the given value and what to do instead.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncloader.samplers.distributed import ON_UNEVEN
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from asyncloader.workers.fetch.decoding import check_decode

__all__ = [
    "check_concurrency_options",
    "check_device_options",
    "check_fault_options",
    "check_seed_options",
    "is_seed",
]

RESUME = ("exact", "replay")


def check_seed_options(
    *,
    iterable: bool,
    seed: Any,
    generator: Any,
    rank: Any,
    world_size: Any,
    on_uneven: Any,
    resume: Any,
    snapshot_every_n_steps: Any,
    run_ahead: Any,
) -> None:
    """Check the options of seeded mode and of resuming.

    Raises:
        ValueError: one is out of range, or two exclude one another.
    """
    if seed is not None and not is_seed(seed):
        raise ValueError(f"seed should be an integer between 0 and 2**64 - 1 or None, but got seed={seed!r}")
    if seed is not None and generator is not None:
        raise ValueError(
            f"seed={seed} and generator exclude one another: with a seed no generator is drawn from. Leave one out"
        )
    if seed is None and (rank is not None or world_size is not None):
        raise ValueError(
            f"rank={rank!r} and world_size={world_size!r} need seed=: without it the loader is torch's, which leaves "
            "sharding to the sampler (torch's DistributedSampler)"
        )
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, but got rank={rank!r} and world_size={world_size!r}")
    if world_size is not None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size should be a positive integer, but got world_size={world_size!r}")
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"rank should be between 0 and world_size - 1 = {world_size - 1}, but got rank={rank!r}")
    if on_uneven not in ON_UNEVEN:
        raise ValueError(f"on_uneven should be one of {', '.join(ON_UNEVEN)}, but got on_uneven={on_uneven!r}")
    if iterable and on_uneven in ("pad", "repeat"):
        raise ValueError(
            f"on_uneven={on_uneven!r} needs a map dataset: samples of a stream cannot be fetched a second time. "
            "Use on_uneven='drop' or 'error'"
        )
    if resume not in RESUME:
        raise ValueError(f"resume should be 'exact' or 'replay', but got resume={resume!r}")
    every = snapshot_every_n_steps
    if every is not None and (not isinstance(every, int) or every < 0):
        raise ValueError(
            f"snapshot_every_n_steps should be a non-negative integer or None, but got snapshot_every_n_steps={every!r}"
        )
    if not isinstance(run_ahead, int) or run_ahead < 0:
        raise ValueError(f"run_ahead should be a non-negative number of batches, but got run_ahead={run_ahead!r}")


def is_seed(seed: Any) -> bool:
    """Whether this is a valid `seed=`: an integer of 64 bits without a sign."""
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 64


def check_concurrency_options(
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


def check_fault_options(
    *,
    worker_timeout: Any,
    max_worker_restarts: Any,
    on_error: Any,
    bad_samples: Any,
    max_bad_samples: Any,
    worker_memory_limit: Any,
    seed: Any,
    dataset: Any,
    iterable: bool,
) -> None:
    """Check them.

    Raises:
        ValueError: one is out of range, or needs another.
    """
    if worker_timeout is not None and not (_is_number(worker_timeout) and worker_timeout > 0):
        raise ValueError(
            f"worker_timeout should be a positive number of seconds or None, but got worker_timeout={worker_timeout!r}"
        )
    for name, value, least in (
        ("max_worker_restarts", max_worker_restarts, 0),
        ("max_bad_samples", max_bad_samples, 0),
        ("worker_memory_limit", worker_memory_limit, 1),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            kind = "a positive number of bytes" if name == "worker_memory_limit" else "a non-negative integer"
            raise ValueError(f"{name} should be {kind} or None, but got {name}={value!r}")
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ValueError(
            "on_error should be 'raise', 'skip' or a function of an index and an exception, but got "
            f"on_error={on_error!r}"
        )
    if bad_samples not in ("short", "refill"):
        raise ValueError(f"bad_samples should be 'short' or 'refill', but got bad_samples={bad_samples!r}")
    if bad_samples == "refill":
        _check_refill(on_error=on_error, seed=seed, dataset=dataset, iterable=iterable)


def _check_refill(*, on_error: Any, seed: Any, dataset: Any, iterable: bool) -> None:
    if on_error != "skip":
        raise ValueError(f"bad_samples='refill' needs on_error='skip', but got on_error={on_error!r}")
    if seed is None:
        raise ValueError("bad_samples='refill' needs seed=: the substitutes are drawn from it")
    if iterable or not hasattr(dataset, "__len__"):
        raise ValueError("bad_samples='refill' needs a map dataset with a length: substitutes are other samples of it")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_device_options(*, device: Any, prefetch_device: Any, device_transform: Any, static_buffers: Any) -> None:
    """Check the options.

    Raises:
        TypeError, ValueError: one is out of range, or does not go with the others.
    """
    if not isinstance(prefetch_device, int) or isinstance(prefetch_device, bool) or prefetch_device < 1:
        raise ValueError(
            f"prefetch_device should be a number of batches, at least 1, but got prefetch_device={prefetch_device!r}"
        )
    if device_transform is not None and not callable(device_transform):
        raise TypeError(
            f"device_transform should be a function from a batch to a batch, but got {type(device_transform).__name__}"
        )
    if device is None:
        given = {"device_transform": device_transform is not None, "static_buffers": bool(static_buffers)}
        for name in (name for name, set_ in given.items() if set_):
            raise ValueError(f"{name} is about batches on a device, and needs device=, for example device='cuda'")
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device should be what torch.device takes, but got device={device!r}: {error}") from None
