"""Sets up one epoch from its options: random numbers and sampler order, scheduler, and the workers' setup.

Data path: options -> [plan] -> pool, scheduler, iterators.

`make_scheduler` builds what plans the epoch; `worker_setup` and `make_pool` build what the workers get.

`TorchIterator` is torch's iterator base under our iterators. `_BaseDataLoaderIter` draws the base seed and asks the
sampler for an iterator, in torch's order and from torch's generators; that is what makes torch mode equal to torch. In
seeded mode the same base draws from a generator that is derived from the seed.

Libraries patch that base and use its attributes. It is therefore given the loader itself, and indices are read through
the attributes that it has: `_next_index` and `_sampler_iter`, which starts as the epoch's `IndexStream`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler, IterDataPipe, MapDataPipe, default_collate, default_convert
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from asyncloader.epoch.credits import least_credits, most_credits
from asyncloader.epoch.quarantine import Quarantine
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import PositionedIndex
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.async_sampler import AsyncIndexSource
from asyncloader.samplers.distributed import RankView
from asyncloader.samplers.generators import drawing_from, drawn_from, generator_states, iterates_plainly, own_generator
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.state.progress import Progress
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.plain_context import plain_context
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.seeding import derive, draw_device
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.memory.kept_rings import KeptRings
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.source import LocalWorkers, WorkerSource

__all__ = [
    "TorchIterator",
    "check_workers",
    "make_pool",
    "make_scheduler",
    "quarantine",
    "shared_seed",
    "start_method",
    "warn_over_length",
    "worker_context",
    "worker_setup",
]


def worker_context(config: EpochConfig) -> Any:
    """The multiprocessing context; torch's default when none was given. For remote datasets "forkserver" replaces
    "fork": the main process has read from the store, and a client's threads and connections do not survive a fork.
    """
    if config.multiprocessing_context is not None:
        return config.multiprocessing_context
    if config.assigns_shards and torch.multiprocessing.get_start_method() == "fork":
        return torch.multiprocessing.get_context("forkserver")
    return torch.multiprocessing


def start_method(config: EpochConfig) -> str:
    """The start method of the workers; "service" if they are elsewhere."""
    return str(worker_context(config).get_start_method()) if config.workers is None else "service"


def check_workers(config: EpochConfig) -> None:
    """Check the numbers that torch checks when an iterator with workers is made.

    Raises:
        AssertionError, TypeError: a number was set that the constructor would have refused, or prefetch_factor=0. Text
            and moment are torch's.
    """
    prefetch: Any = config.prefetch_factor
    for name, value in (("num_workers", config.num_workers), ("prefetch_factor", prefetch)):
        if value <= 0:
            raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")


def worker_setup(
    config: EpochConfig, torch_iter: _BaseDataLoaderIter, base_seed: int, starts: Sequence[EpochStart]
) -> WorkerSetup:
    """The setup for readers of the dataset.

    Args:
        config: the options of the epoch in which the readers begin.
        torch_iter: torch's iterator base, which has drawn this iterator's random numbers.
        base_seed: worker i is seeded with ``base_seed + i``.
        starts: one per worker; one to read in the consumer's own process.
    """
    init = config.worker_init_fn
    dataset = torch_iter._dataset
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        init = functools.partial(_sharding_worker_init_fn, init, torch_iter._world_size, torch_iter._rank)
    return WorkerSetup(
        dataset=dataset,
        iterable=config.iterable,
        auto_collation=config.auto_collation,
        batch_size=config.batch_size,
        collate_fn=config.collate_fn,
        drop_last=config.drop_last,
        base_seed=base_seed,
        worker_init_fn=init,
        num_workers=config.num_workers,
        concurrency=config.concurrency,
        starts=starts,
        snapshot_every=config.dataset_snapshot_every,
        seeded=_seeded_setup(config, torch_iter),
        memory_limit=config.worker_memory_limit,
        replays=config.replays,
        policy=_policy(config),
        fetch_threads=config.fetch_threads,
        decode=config.decode,
        decode_threads=config.decode_threads,
    )


def quarantine(config: EpochConfig, torch_iter: _BaseDataLoaderIter) -> Quarantine:
    """The handler for tasks that kill their workers."""
    setup = _seeded_setup(config, torch_iter)
    replicas = 1 if setup is None else setup.replicas
    return Quarantine(config.on_error, config.collate_fn, batched=config.auto_collation, replicas=replicas)


def _policy(config: EpochConfig) -> ErrorPolicy | None:
    if config.on_error == "raise":
        return None
    refill = config.on_error == "refill"
    return ErrorPolicy(
        "skip" if refill else config.on_error, refill, len(config.dataset) if refill else None, config.seed
    )


def _seeded_setup(config: EpochConfig, torch_iter: _BaseDataLoaderIter) -> SeededSetup | None:
    if config.seed is None:
        return None
    share = getattr(torch_iter._index_sampler, "share", None)
    return SeededSetup(
        seed=config.seed,
        replicas=1 if share is None or share.of_batches else share.replicas,
        first_stream=config.topology.rank * max(1, config.num_workers),
        seed_collate=config.collate_fn not in (default_collate, default_convert),
    )


def make_pool(config: EpochConfig, setup: WorkerSetup, kept: KeptRings | None, statistics: Statistics) -> WorkerPool:
    """Start the workers. Blocks. With the start method "fork", call it in the iterating thread.

    Args:
        config: the options that the workers keep.
        setup: what each worker gets.
        kept: the loader's page-locked rings between epochs.
        statistics: the loader's counters.
    """
    return WorkerPool(
        _worker_source(config),
        setup,
        most_credits(config),
        config.ring_bytes,
        config.reorder_window,
        worker_timeout=config.worker_timeout,
        least_credits=least_credits(config),
        kept=kept,
        statistics=statistics,
    )


def _worker_source(config: EpochConfig) -> WorkerSource:
    if config.workers is None:
        return LocalWorkers(
            worker_context(config),
            replaces=config.max_restarts > 0 or config.worker_memory_limit is not None,
            # The user did not choose the fork server: see `worker_context`.
            passes_environ=config.assigns_shards and config.multiprocessing_context is None,
        )
    from asyncloader.service.client.remote_workers import ServiceWorkers

    return ServiceWorkers(config.dataset, most_credits(config))


def make_scheduler(config: EpochConfig, first_worker: int) -> Scheduler:
    """A scheduler for one epoch, in which worker `first_worker` comes first."""
    return Scheduler(
        workers=config.num_workers,
        credits=most_credits(config),
        in_order=config.in_order,
        iterable=config.iterable,
        # torch defines which worker makes which batch. That matters in torch mode and for iterable datasets, whose
        # copies are read in turn. In seeded mode and with an async sampler any worker may take a task.
        assignment="least_loaded" if config.free else "round_robin",
        reorder_window=config.reorder_window,
        first_worker=first_worker,
        max_restarts=config.max_restarts,
        concurrent=config.concurrent,
    )


class TorchIterator(_BaseDataLoaderIter):
    """torch's iterator base under our iterators.

    Args:
        loader: the loader that is iterated.
        progress: the iterator's position.
    """

    order: IndexStream | None = None
    """The epoch's indices from the iterator's position on; None without a plain sampler."""
    _awaited: Progress | None = None  # set while torch's base makes the sampler's iterator
    _states: dict[str, torch.Tensor] | None = None  # the generators' states before that

    def __init__(self, loader: LoaderSpec[Any], progress: Progress) -> None:
        with self._drawing(loader, progress):
            super().__init__(loader)

    def _begin_order(self, loader: LoaderSpec[Any], progress: Progress, *, first_iter: bool = False) -> None:
        """Call torch's `_reset` for an epoch that begins at this position."""
        with self._drawing(loader, progress):
            if progress.config.seeded and not first_iter:
                self._index_sampler = (
                    loader._index_sampler
                )  # rank and world size, and with them the share, may have changed
            _BaseDataLoaderIter._reset(self, loader, first_iter)

    @plain_context
    def _drawing(self, loader: LoaderSpec[Any], progress: Progress) -> Generator[None]:
        """In this context the first iterator that is assigned to `_sampler_iter` becomes the epoch's order. In seeded
        mode random numbers are drawn from a generator of the seed and the epoch, and the global generators do not
        advance.
        """
        seed = progress.config.seed
        self._awaited = progress
        self._note_states()
        try:
            if seed is None:
                with _on_device_of(loader.generator):
                    yield
            else:
                generator = torch.Generator()
                generator.manual_seed(derive(seed, "iterator", progress.epoch))
                with drawing_from(generator, loader), _on_device_of(generator):
                    yield
        finally:
            self._awaited = self._states = None

    def _note_states(self) -> None:
        """Save the generators' states: a user's sampler may draw in `__iter__`, which is called next."""
        sampler = self._index_sampler
        known = isinstance(sampler, (AsyncIndexSource, RankView)) or type(sampler) is BatchSampler
        if self._awaited is not None and sampler is not None and not known and not iterates_plainly(sampler):
            self._states = generator_states(own_generator(sampler))

    @property
    def _index_sampler(self) -> Any:
        return self.__dict__.get("_index_sampler")

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        self.__dict__["_index_sampler"] = sampler
        self._note_states()

    @property
    def _sampler_iter(self) -> Any:
        return self.__dict__.get("_sampler_iter")

    @_sampler_iter.setter
    def _sampler_iter(self, iterator: Any) -> None:
        progress, self._awaited = self._awaited, None
        if progress is not None:  # else a library replaced the iterator
            sampler = self._index_sampler
            self.order = None
            if self._dataset_kind != DatasetKind.Iterable and not isinstance(sampler, AsyncIndexSource):
                before = self._states
                drawn = None if before is None else drawn_from(before, generator_states(own_generator(sampler)))
                iterator = self.order = progress.stream(sampler, iterator, drawn)
        self.__dict__["_sampler_iter"] = iterator

    def pull(self, task: int | None = None) -> tuple[int | None, Any]:
        """The next step's number and index. The number is None if a library replaced `_sampler_iter`, so that the index
        is not from the epoch's order. A second call for the same task returns the same again.

        Raises:
            StopIteration: at the end.
            TypeError: in seeded mode, if the replaced `_sampler_iter` gives indices without positions.
        """
        if self.order is not None and self._sampler_iter is self.order:
            return self.order.pull(task)
        index: Any = self._next_index()  # type: ignore[no-untyped-call]
        if isinstance(self._index_sampler, RankView) and not isinstance(index, PositionedIndex):
            raise TypeError(
                f"in seeded mode random numbers follow from positions, which {type(self._sampler_iter).__name__}, put "
                "in the place of the iterator's _sampler_iter, does not give: advance that one, or leave out seed="
            )
        return None, index

    def duplicate(self) -> Self:
        """A copy, with the same random numbers, for another iterator."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


def _on_device_of(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Context in which torch's base can draw from this generator whatever `torch.set_default_device` says: it names no
    device.
    """
    device = draw_device(generator)
    return nullcontext() if device.type == torch.get_default_device().type else device


def shared_seed(torch_iter: _BaseDataLoaderIter) -> int | None:
    """The seed that all workers and ranks share, for torch's datapipes; None for other datasets."""
    return None if torch_iter._shared_seed is None else int(torch_iter._shared_seed)


def warn_over_length(torch_iter: _BaseDataLoaderIter) -> None:
    """Give torch's warning if an iterable dataset yields more than its length. Call after counting a batch."""
    reported = torch_iter._IterableDataset_len_called
    if torch_iter._dataset_kind != DatasetKind.Iterable or reported is None or torch_iter._num_yielded <= reported:
        return
    message = (
        f"Length of IterableDataset {torch_iter._dataset} was reported to be {reported}"
        f"(when accessing len(dataloader)), but {torch_iter._num_yielded} samples have been fetched. "
    )
    if torch_iter._num_workers > 0:
        message += (
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
        )
    warnings.warn(message, stacklevel=3)
