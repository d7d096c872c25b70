"""A loader's options: torch's constructor with torch's checks, and ours, validated once.

Data path: none; read before the first stage starts.

`LoaderSpec` is a `torch.utils.data.DataLoader` whose iteration is replaced. Both loaders stand on it: the sync one *is*
one, the async one *has* one. Options that torch lets a user change after construction are read when iteration starts.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from asyncloader.sampler import AsyncIndexSource, as_async_source
from asyncloader.scheduler import Scheduler
from asyncloader.workers.fetch import is_async_stream
from asyncloader.workers.info import WorkerSetup

__all__ = [
    "DEFAULT_CONCURRENCY",
    "OPTION_NAMES",
    "EpochPlan",
    "LoaderSpec",
    "async_index_source",
    "epoch_plan",
    "is_iterable",
    "shared_seed",
    "start_method",
    "usable_cpus",
    "warn_over_length",
    "worker_context",
    "worker_setup",
]

T_co = TypeVar("T_co", covariant=True)

DEFAULT_CONCURRENCY = 256


class LoaderSpec(torch.utils.data.DataLoader[T_co]):
    """torch's loader with our options beside torch's. Both are stored unmodified under their own names.

    Args:
        ring_bytes: upper bound of each worker's ring in bytes, at least 4096 a slot; default None: the ring follows
            the batches seen. Larger batches then go through memory of their own, once each.
        concurrency: samples that a worker awaits at a time, for datasets with ``async`` methods; default 256.

    Raises:
        ValueError, TypeError: torch's, in torch's order and words, then ours.
    """

    ring_bytes: int | None
    concurrency: int

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        ring_bytes: int | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> None:
        stream = is_async_stream(dataset)
        super().__init__(
            _AsyncStream() if stream else dataset,  # torch's checks are those of an iterable dataset
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if stream:
            self.__dict__["dataset"] = dataset  # torch refuses the plain assignment from here on
        if ring_bytes is not None and (not isinstance(ring_bytes, int) or ring_bytes < 1):
            raise ValueError(
                f"ring_bytes should be a positive number of bytes or None, but got ring_bytes={ring_bytes!r}"
            )
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"concurrency should be a positive integer, but got concurrency={concurrency!r}")
        self.ring_bytes = ring_bytes
        self.concurrency = concurrency
        self.__dict__["_asyncloader_maker"] = os.getpid()  # made here, and not a copy

    @property
    def _index_sampler(self) -> Any:
        # torch's iterator calls `iter()` on it at once; an async sampler answers with nothing and is read elsewhere.
        plain = super()._index_sampler
        source = as_async_source(plain)
        return plain if source is None else source

    def check_worker_number_rationality(self) -> None:
        """torch's warning about too many workers, which knows a container's CPU quota too."""
        quota = _cpu_quota()
        if not self.num_workers or quota is None or quota >= _affinity():
            super().check_worker_number_rationality()
            return
        if self.num_workers > quota:
            warnings.warn(
                f"This DataLoader will create {self.num_workers} worker processes in total. Our suggested max number "
                f"of worker in current system is {quota} (the control group's CPU quota), which is smaller than what "
                "this DataLoader is going to create. Please be aware that excessive worker creation might get "
                "DataLoader running slow or even freeze, lower the worker number to avoid potential slowness/freeze "
                "if necessary.",
                stacklevel=2,
            )


class _AsyncStream(IterableDataset[Any]):
    """Stands for an asynchronous stream that is none of torch's classes while torch's constructor looks at it."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("an asynchronous stream cannot be iterated with a plain for")


OPTION_NAMES = tuple(inspect.signature(LoaderSpec).parameters)
"""Every argument of the loaders; each but `shuffle`, which becomes a sampler, is an attribute under the same name."""

LoaderSpec.__init__.__qualname__ = "DataLoader.__init__"  # what Python's own errors about arguments call it


# Functions, not attributes: a user's subclass of the loader may have attributes of any name.


def is_iterable(spec: LoaderSpec[Any]) -> bool:
    """Whether the dataset is iterated rather than indexed."""
    return bool(spec._dataset_kind == DatasetKind.Iterable)


def async_index_source(spec: LoaderSpec[Any]) -> AsyncIndexSource | None:
    """The index sampler if it is an async one, else None."""
    sampler = spec._index_sampler
    return sampler if isinstance(sampler, AsyncIndexSource) else None


def worker_context(spec: LoaderSpec[Any]) -> Any:
    """The multiprocessing context, torch's default when none was given."""
    return torch.multiprocessing if spec.multiprocessing_context is None else spec.multiprocessing_context


def start_method(spec: LoaderSpec[Any]) -> str:
    """The start method that workers will have."""
    return str(worker_context(spec).get_start_method())


def worker_setup(spec: LoaderSpec[Any], plan: EpochPlan, draws: _BaseDataLoaderIter) -> WorkerSetup:
    """What the workers need, from the options as they are now and the random numbers drawn for this iterator."""
    init = spec.worker_init_fn
    dataset = draws._dataset
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        init = functools.partial(_sharding_worker_init_fn, init, draws._world_size, draws._rank)
    return WorkerSetup(
        dataset=dataset,
        iterable=plan.iterable,
        auto_collation=bool(spec._auto_collation),
        batch_size=spec.batch_size,
        collate_fn=spec.collate_fn,
        drop_last=spec.drop_last,
        base_seed=int(draws._base_seed),
        worker_init_fn=init,
        num_workers=plan.workers,
        shared_seed=shared_seed(draws),
        concurrency=spec.concurrency,
    )


def shared_seed(draws: _BaseDataLoaderIter) -> int | None:
    """The seed that all workers and ranks share, for torch's datapipes; None for other datasets."""
    return None if draws._shared_seed is None else int(draws._shared_seed)


class EpochPlan(NamedTuple):
    """The options that shape an epoch with workers. Persistent workers keep those that they were started with."""

    workers: int
    credits: int
    """Tasks that a worker may have outstanding: torch's `prefetch_factor`."""
    in_order: bool
    iterable: bool
    source: AsyncIndexSource | None

    def scheduler(self) -> Scheduler:
        """A scheduler for one epoch."""
        return Scheduler(
            workers=self.workers,
            credits=self.credits,
            in_order=self.in_order,
            iterable=self.iterable,
            # An async sampler's order is no promise of torch's: whoever is free may work.
            assignment="round_robin" if self.source is None else "least_loaded",
        )


def epoch_plan(spec: LoaderSpec[Any]) -> EpochPlan:
    """The plan of the options as they are now.

    Raises:
        AssertionError, TypeError: a number that the constructor would not have taken, or prefetch_factor=0, in torch's
            words and as late as torch finds it.
    """
    prefetch: Any = spec.prefetch_factor
    for name, value in (("num_workers", spec.num_workers), ("prefetch_factor", prefetch)):
        if value <= 0:
            raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")
    return EpochPlan(spec.num_workers, prefetch, spec.in_order, is_iterable(spec), async_index_source(spec))


def warn_over_length(draws: _BaseDataLoaderIter) -> None:
    """torch's warning when an iterable dataset gives more than its length said. Call after counting a batch."""
    reported = draws._IterableDataset_len_called
    if draws._dataset_kind != DatasetKind.Iterable or reported is None or draws._num_yielded <= reported:
        return
    message = (
        f"Length of IterableDataset {draws._dataset} was reported to be {reported}"
        f"(when accessing len(dataloader)), but {draws._num_yielded} samples have been fetched. "
    )
    if draws._num_workers > 0:
        message += (
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
        )
    warnings.warn(message, stacklevel=3)


def usable_cpus() -> int:
    """CPUs that this process may use: affinity, and the control group's quota."""
    quota = _cpu_quota()
    return _affinity() if quota is None else max(1, min(_affinity(), quota))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota() -> int | None:
    """The tightest CPU quota of this process's control groups in whole CPUs, rounded up; None when there is none."""
    quotas: list[float] = []
    for group in _cpu_groups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:
                quota = (group / "cpu.cfs_quota_us").read_text().strip()
                period = (group / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return max(1, math.ceil(min(quotas))) if quotas else None


def _cpu_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    groups: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root if not controllers else root / controllers
        if not controllers or "cpu" in controllers.split(","):
            group = top / path.lstrip("/")
            groups += [p for p in (group, *group.parents) if p == top or top in p.parents]
    return groups
