"""What one epoch is made with: the workers' set-up, and the options that shape the scheduling.

Data path: options -> [epoch_plan] -> pool, scheduler. Read when iteration starts: torch lets a user change most options
until then.

torch's iterator base under our iterators: its random numbers, and the order that is read from it.

Data path: options -> [draws] -> the iterators. `_BaseDataLoaderIter` draws an iterator's base seed, and asks the
sampler for an iterator, in torch's order and from torch's generators: that keeps torch mode torch's. In seeded mode the
same base draws from the seed instead.

Libraries patch that base, and reach into what it holds. So it is given the loader itself, and what it holds is what is
read: `_sampler_iter`, which begins as the epoch's `IndexStream`, through `_next_index`.
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
from asyncloader.events import Placed
from asyncloader.options import LoaderSpec, async_index_source, is_iterable, max_restarts, most_credits
from asyncloader.samplers.async_sampler import AsyncIndexSource
from asyncloader.samplers.distributed import RankView, even_ranks, topology
from asyncloader.samplers.generators import drawing_from, drawn_from, generator_states, iterates_plainly, own_generator
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.decoding import Chain
from asyncloader.workers.fetch.factory import is_concurrent
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.pool import WorkerPool

__all__ = [
    "Draws",
    "EpochPlan",
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
    """The multiprocessing context, torch's default when none was given; "forkserver" in place of "fork" for datasets
    that the main process has read from itself: threads and connections of a store's client do not survive a fork.
    """
    if spec.multiprocessing_context is not None:
        return spec.multiprocessing_context
    if assigns_shards(spec.dataset) and torch.multiprocessing.get_start_method() == "fork":
        return torch.multiprocessing.get_context("forkserver")
    return torch.multiprocessing


def start_method(spec: LoaderSpec[Any]) -> str:
    """The start method that workers will have."""
    return str(worker_context(spec).get_start_method())


def worker_setup(
    spec: LoaderSpec[Any], workers: int, draws: _BaseDataLoaderIter, base_seed: int, starts: Sequence[EpochStart]
) -> WorkerSetup:
    """What readers of the dataset need, from the options as they are now.

    Args:
        spec: the loader.
        workers: their number; 0 for the consumer's own process.
        draws: torch's iterator base, which has drawn this iterator's random numbers.
        base_seed: the workers' seeds count from it.
        starts: one a worker.
    """
    init = spec.worker_init_fn
    dataset = draws._dataset
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        init = functools.partial(_sharding_worker_init_fn, init, draws._world_size, draws._rank)
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
        seeded=_seeded_setup(spec, workers, draws),
        memory_limit=spec._asyncloader_options.worker_memory_limit,
        replays=_replays(spec),
        policy=_policy(spec),
        fetch_threads=spec._asyncloader_options.fetch_threads,
        decode=_decode(spec),
        decode_threads=spec._asyncloader_options.decode_threads,
    )


def quarantine(spec: LoaderSpec[Any], draws: _BaseDataLoaderIter) -> Quarantine:
    """What deals with tasks that kill their workers."""
    setup = _seeded_setup(spec, spec.num_workers, draws)
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
        return 1  # read again with shards assigned in another order, the stream would have other batches
    return spec._asyncloader_options.snapshot_every_n_steps or 0


def _replays(spec: LoaderSpec[Any]) -> bool:
    # A worker is assigned the same shards again, so its stream is the same.
    return spec._asyncloader_options.resume == "replay" or spec._asyncloader_replays or assigns_shards(spec.dataset)


def _policy(spec: LoaderSpec[Any]) -> ErrorPolicy | None:
    ours = spec._asyncloader_options
    if ours.on_error == "raise":
        return None
    refill = ours.bad_samples == "refill"
    length = len(spec.dataset) if refill else None  # type: ignore[arg-type]
    return ErrorPolicy(ours.on_error, refill, length, ours.seed)


def _seeded_setup(spec: LoaderSpec[Any], workers: int, draws: _BaseDataLoaderIter) -> SeededSetup | None:
    if spec._asyncloader_options.seed is None:
        return None
    share = getattr(draws._index_sampler, "share", None)
    return SeededSetup(
        seed=spec._asyncloader_options.seed,
        replicas=1 if share is None or share.of_batches else share.replicas,
        first_stream=topology(spec).rank * max(1, workers),
        seed_collate=spec.collate_fn not in (default_collate, default_convert),
    )


def make_pool(spec: LoaderSpec[Any], setup: WorkerSetup, plan: EpochPlan) -> WorkerPool:
    """Start workers. Blocks; with the start method "fork" it must be called in the thread that iterates."""
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
    """The options that shape an epoch with workers. Persistent workers keep those that they were started with."""

    workers: int
    credits: int
    """Tasks that a worker may have outstanding while batches are small."""
    least_credits: int
    """Tasks that it may in any case: torch's `prefetch_factor`."""
    in_order: bool
    iterable: bool
    source: AsyncIndexSource | None
    run_ahead: int
    """Batches that may be ready before an earlier one; 0 in torch mode."""
    seeded: bool
    max_restarts: int
    """How often each worker may be replaced."""
    concurrent: bool
    """Whether a worker has several tasks in hand at a time."""
    ranks: int
    """How many ranks share the samples of a map dataset evenly, and wait for one another; 1 in torch mode."""
    replays: bool
    """Whether a stream without a state may be read again from its beginning."""

    @property
    def free(self) -> bool:
        """Whether no promise binds a batch to a worker."""
        return self.source is not None or (self.seeded and not self.iterable)

    @property
    def offers(self) -> int:
        """Indices that the scheduler may want before the first delivery."""
        return self.credits * self.workers + self.run_ahead

    def scheduler(self, turn: int) -> Scheduler:
        """A scheduler for one epoch, in which worker `turn` comes first."""
        return Scheduler(
            workers=self.workers,
            credits=self.credits,
            in_order=self.in_order,
            iterable=self.iterable,
            # Neither seeded mode nor an async sampler's order is torch's promise: whoever is free may work. The order
            # of an iterable dataset's copies is.
            assignment="least_loaded" if self.free else "round_robin",
            run_ahead=self.run_ahead,
            turn=turn,
            max_restarts=self.max_restarts,
            concurrent=self.concurrent,
        )

    @property
    def adapts(self) -> bool:
        """Whether the scheduler is to be told how many batches the rings have room for."""
        return self.run_ahead > 0 or self.credits > self.least_credits


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


class Draws(_BaseDataLoaderIter):
    """torch's iterator base for an iterator of ours.

    Args:
        loader: whose iterator it is.
        progress: the iterator's position.
    """

    order: IndexStream | None = None
    """The epoch's order from the iterator's position on; None where no plain sampler makes one."""
    _awaited: Progress | None = None  # the position of the order that torch's base is about to make
    _states: dict[str, torch.Tensor] | None = None  # of the generators, before that

    def __init__(self, loader: LoaderSpec[Any], progress: Progress) -> None:
        with self._drawing(loader, progress):
            super().__init__(loader)

    def _begin_order(self, loader: LoaderSpec[Any], progress: Progress, *, first_iter: bool = False) -> None:
        """torch's `_reset`, for an iterator at this position."""
        with self._drawing(loader, progress):
            if loader._asyncloader_options.seed is not None and not first_iter:
                self._index_sampler = loader._index_sampler  # the ranks may be others, and the share with them
            _BaseDataLoaderIter._reset(self, loader, first_iter)

    @contextlib.contextmanager
    def _drawing(self, loader: LoaderSpec[Any], progress: Progress) -> Generator[None]:
        """Inside, the first iterator that becomes `_sampler_iter` is the epoch's; in seeded mode, random numbers are of
        the seed and the epoch, and the process's generators stay where they are.
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
        """A user's sampler may draw when it is asked for an iterator, which comes next."""
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
        if progress is not None:  # else somebody has put an iterator of his own in its place
            sampler = self._index_sampler
            self.order = None
            if self._dataset_kind != DatasetKind.Iterable and not isinstance(sampler, AsyncIndexSource):
                before = self._states
                drawn = None if before is None else drawn_from(before, generator_states(own_generator(sampler)))
                iterator = self.order = progress.stream(sampler, iterator, drawn)
        self.__dict__["_sampler_iter"] = iterator

    def pull(self, task: int | None = None) -> tuple[int | None, Any]:
        """The next step's number and index. The number is None if the index is not of the epoch's order. One that is,
        is given again if it is asked for again for the same task.

        Raises:
            StopIteration: at the end.
            TypeError: in seeded mode, what was put in the order's place gives indices without positions.
        """
        if self.order is not None and self._sampler_iter is self.order:
            return self.order.pull(task)
        index: Any = self._next_index()  # type: ignore[no-untyped-call]
        if isinstance(self._index_sampler, RankView) and not isinstance(index, Placed):
            raise TypeError(
                f"in seeded mode random numbers follow from positions, which {type(self._sampler_iter).__name__}, put "
                "in the place of the iterator's _sampler_iter, does not give: advance that one, or leave out seed="
            )
        return None, index

    def twin(self) -> Self:
        """The same draws, for another iterator."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


def shared_seed(draws: _BaseDataLoaderIter) -> int | None:
    """The seed that all workers and ranks share, for torch's datapipes; None for other datasets."""
    return None if draws._shared_seed is None else int(draws._shared_seed)


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
