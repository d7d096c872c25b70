"""Sets up one epoch: its options, its random numbers and sampler order, and the workers' setup.

Data path: options -> [plan] -> pool, scheduler, iterators.

Everything is read when iteration starts, because torch lets a user change most options until then. `EpochPlan` holds
the options that shape the scheduling; `worker_setup` and `make_pool` build what the workers get.

`TorchIterator` is torch's iterator base under our iterators. `_BaseDataLoaderIter` draws the base seed and asks the
sampler for an iterator, in torch's order and from torch's generators; that is what makes torch mode equal to torch. In
seeded mode the same base draws from a generator that is derived from the seed.

Libraries patch that base and use its attributes. It is therefore given the loader itself, and indices are read through
the attributes that it has: `_next_index` and `_sampler_iter`, which starts as the epoch's `IndexStream`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.utils.data import BatchSampler, IterDataPipe, MapDataPipe, default_collate, default_convert
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from asyncloader.delivery.transfer import kept_rings_of
from asyncloader.epoch.quarantine import Quarantine
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import PositionedIndex
from asyncloader.options import LoaderSpec, async_index_source, is_iterable, max_restarts, most_credits
from asyncloader.samplers.async_sampler import AsyncIndexSource
from asyncloader.samplers.distributed import RankView, even_ranks, topology
from asyncloader.samplers.generators import drawing_from, drawn_from, generator_states, iterates_plainly, own_generator
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import is_concurrent
from asyncloader.workers.fetch.decoding import Chain
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.pool import WorkerPool

__all__ = [
    "EpochPlan",
    "TorchIterator",
    "epoch_plan",
    "make_pool",
    "quarantine",
    "shared_seed",
    "start_method",
    "warn_over_length",
    "worker_context",
    "worker_setup",
]


def worker_context(spec: LoaderSpec[Any]) -> Any:
    """The multiprocessing context; torch's default when none was given. For remote datasets "forkserver" replaces
    "fork": the main process has read from the store, and a client's threads and connections do not survive a fork.
    """
    if spec.multiprocessing_context is not None:
        return spec.multiprocessing_context
    if assigns_shards(spec.dataset) and torch.multiprocessing.get_start_method() == "fork":
        return torch.multiprocessing.get_context("forkserver")
    return torch.multiprocessing


def start_method(spec: LoaderSpec[Any]) -> str:
    """The start method of the workers."""
    return str(worker_context(spec).get_start_method())


def worker_setup(
    spec: LoaderSpec[Any], workers: int, torch_iter: _BaseDataLoaderIter, base_seed: int, starts: Sequence[EpochStart]
) -> WorkerSetup:
    """The setup for readers of the dataset, from the current options.

    Args:
        spec: the loader.
        workers: number of workers; 0 to read in the consumer's own process.
        torch_iter: torch's iterator base, which has drawn this iterator's random numbers.
        base_seed: worker i is seeded with ``base_seed + i``.
        starts: one per worker.
    """
    init = spec.worker_init_fn
    dataset = torch_iter._dataset
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        init = functools.partial(_sharding_worker_init_fn, init, torch_iter._world_size, torch_iter._rank)
    return WorkerSetup(
        dataset=dataset,
        iterable=is_iterable(spec),
        auto_collation=bool(spec._auto_collation),
        batch_size=spec.batch_size,
        collate_fn=spec.collate_fn,
        drop_last=spec.drop_last,
        base_seed=base_seed,
        worker_init_fn=init,
        num_workers=workers,
        concurrency=spec._asyncloader_options.concurrency,
        starts=starts,
        snapshot_every=_snapshot_every(spec),
        seeded=_seeded_setup(spec, workers, torch_iter),
        memory_limit=spec._asyncloader_options.worker_memory_limit,
        replays=_replays(spec),
        policy=_policy(spec),
        fetch_threads=spec._asyncloader_options.fetch_threads,
        decode=_decode(spec),
        decode_threads=spec._asyncloader_options.decode_threads,
    )


def quarantine(spec: LoaderSpec[Any], torch_iter: _BaseDataLoaderIter) -> Quarantine:
    """The handler for tasks that kill their workers."""
    setup = _seeded_setup(spec, spec.num_workers, torch_iter)
    return Quarantine(
        spec._asyncloader_options.on_error,
        spec.collate_fn,
        batched=bool(spec._auto_collation),
        replicas=1 if setup is None else setup.replicas,
    )


def _decode(spec: LoaderSpec[Any]) -> Any:
    own = getattr(spec.dataset, "decode", None) if assigns_shards(spec.dataset) else None
    steps = [step for step in (own, spec._asyncloader_options.decode) if step is not None]
    return Chain(steps) if len(steps) > 1 else steps[0] if steps else None


def _snapshot_every(spec: LoaderSpec[Any]) -> int:
    if assigns_shards(spec.dataset) and not spec.in_order:
        return 1  # after a resume shards are assigned in another order, and a replayed stream would have other batches
    return spec._asyncloader_options.snapshot_every_n_steps or 0


def _replays(spec: LoaderSpec[Any]) -> bool:
    # A worker stream is assigned the same shards again, so replaying it gives the same samples.
    return spec._asyncloader_options.resume == "replay" or spec._asyncloader_replays or assigns_shards(spec.dataset)


def _policy(spec: LoaderSpec[Any]) -> ErrorPolicy | None:
    options = spec._asyncloader_options
    if options.on_error == "raise":
        return None
    refill = options.bad_samples == "refill"
    length = len(spec.dataset) if refill else None  # type: ignore[arg-type]
    return ErrorPolicy(options.on_error, refill, length, options.seed)


def _seeded_setup(spec: LoaderSpec[Any], workers: int, torch_iter: _BaseDataLoaderIter) -> SeededSetup | None:
    if spec._asyncloader_options.seed is None:
        return None
    share = getattr(torch_iter._index_sampler, "share", None)
    return SeededSetup(
        seed=spec._asyncloader_options.seed,
        replicas=1 if share is None or share.of_batches else share.replicas,
        first_stream=topology(spec).rank * max(1, workers),
        seed_collate=spec.collate_fn not in (default_collate, default_convert),
    )


def make_pool(spec: LoaderSpec[Any], setup: WorkerSetup, plan: EpochPlan) -> WorkerPool:
    """Start the workers. Blocks. With the start method "fork", call it in the iterating thread."""
    return WorkerPool(
        worker_context(spec),
        setup,
        plan.credits,
        spec._asyncloader_options.ring_bytes,
        plan.run_ahead,
        worker_timeout=spec._asyncloader_options.worker_timeout,
        least_credits=plan.least_credits,
        kept=kept_rings_of(spec),
    )


class EpochPlan(NamedTuple):
    """The options that shape an epoch with workers. Persistent workers keep the plan that they were started with."""

    workers: int
    credits: int
    """Outstanding tasks per worker while batches are small."""
    least_credits: int
    """Outstanding tasks per worker in any case: torch's `prefetch_factor`."""
    in_order: bool
    iterable: bool
    source: AsyncIndexSource | None
    run_ahead: int
    """Batches that may be ready before an earlier one; 0 in torch mode."""
    seeded: bool
    max_restarts: int
    """How often each worker may be replaced."""
    concurrent: bool
    """Whether a worker processes several tasks at a time."""
    ranks: int
    """Number of ranks that share a map dataset's samples evenly and wait for one another; 1 in torch mode."""
    replays: bool
    """Whether a stream without a state may be read again from its beginning to resume it."""

    @property
    def free(self) -> bool:
        """Whether any worker may make any batch."""
        return self.source is not None or (self.seeded and not self.iterable)

    @property
    def offers(self) -> int:
        """Number of indices that the scheduler may request before the first delivery."""
        return self.credits * self.workers + self.run_ahead

    def scheduler(self, first_worker: int) -> Scheduler:
        """A scheduler for one epoch, in which worker `first_worker` comes first."""
        return Scheduler(
            workers=self.workers,
            credits=self.credits,
            in_order=self.in_order,
            iterable=self.iterable,
            # torch defines which worker makes which batch. That matters in torch mode and for iterable datasets, whose
            # copies are read in turn. In seeded mode and with an async sampler any worker may take a task.
            assignment="least_loaded" if self.free else "round_robin",
            run_ahead=self.run_ahead,
            first_worker=first_worker,
            max_restarts=self.max_restarts,
            concurrent=self.concurrent,
        )

    @property
    def adapts(self) -> bool:
        """Whether the scheduler must follow how many batches the rings have room for."""
        return self.run_ahead > 0 or self.credits > self.least_credits


def epoch_plan(spec: LoaderSpec[Any]) -> EpochPlan:
    """The plan from the current options.

    Raises:
        AssertionError, TypeError: a number was set that the constructor would have refused, or prefetch_factor=0. Text
            and moment are torch's.
    """
    prefetch: Any = spec.prefetch_factor
    for name, value in (("num_workers", spec.num_workers), ("prefetch_factor", prefetch)):
        if value <= 0:
            raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")
    iterable, seeded = is_iterable(spec), spec._asyncloader_options.seed is not None
    ahead = spec._asyncloader_options.run_ahead if seeded and spec.in_order and not iterable else 0
    return EpochPlan(
        workers=spec.num_workers,
        credits=most_credits(
            spec, spec._asyncloader_options.concurrency, spec._asyncloader_options.fetch_threads, iterable=iterable
        ),
        least_credits=prefetch,
        in_order=spec.in_order,
        iterable=iterable,
        source=async_index_source(spec),
        run_ahead=ahead,
        seeded=seeded,
        max_restarts=max_restarts(spec._asyncloader_options.max_worker_restarts, seeded=seeded),
        concurrent=is_concurrent(spec.dataset, spec._asyncloader_options.fetch_threads),
        ranks=even_ranks(spec, iterable=iterable),
        replays=_replays(spec),
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
            if loader._asyncloader_options.seed is not None and not first_iter:
                self._index_sampler = (
                    loader._index_sampler
                )  # rank and world size, and with them the share, may have changed
            _BaseDataLoaderIter._reset(self, loader, first_iter)

    @contextlib.contextmanager
    def _drawing(self, loader: LoaderSpec[Any], progress: Progress) -> Generator[None]:
        """In this context the first iterator that is assigned to `_sampler_iter` becomes the epoch's order. In seeded
        mode random numbers are drawn from a generator of the seed and the epoch, and the global generators do not
        advance.
        """
        seed = loader._asyncloader_options.seed
        self._awaited = progress
        self._note_states()
        try:
            if seed is None:
                yield
            else:
                generator = torch.Generator()
                generator.manual_seed(derive(seed, "iterator", progress.epoch))
                with drawing_from(generator, loader):
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
