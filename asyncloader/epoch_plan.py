"""What one epoch is made with: the workers' set-up, and the options that shape the scheduling.

Data path: options -> [epoch_plan] -> pool, scheduler. Read when iteration starts: torch lets a user change most options
until then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate, default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from asyncloader.device.options import kept_rings_of
from asyncloader.fault_options import max_restarts
from asyncloader.flight_options import most_credits
from asyncloader.options import LoaderSpec, async_index_source, is_iterable
from asyncloader.quarantine import Quarantine
from asyncloader.sampler import AsyncIndexSource
from asyncloader.scheduler import Scheduler
from asyncloader.seeded_mode import even_ranks, topology
from asyncloader.workers.bad_samples import ErrorPolicy
from asyncloader.workers.decoding import Chain
from asyncloader.workers.fetch import is_concurrent
from asyncloader.workers.info import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.leasing import is_leased
from asyncloader.workers.pool import WorkerPool

__all__ = ["EpochPlan", "epoch_plan", "make_pool", "quarantine", "start_method", "worker_context", "worker_setup"]


def worker_context(spec: LoaderSpec[Any]) -> Any:
    """The multiprocessing context, torch's default when none was given; "forkserver" in place of "fork" for datasets
    that the main process has read from itself: threads and connections of a store's client do not survive a fork.
    """
    if spec.multiprocessing_context is not None:
        return spec.multiprocessing_context
    if is_leased(spec.dataset) and torch.multiprocessing.get_start_method() == "fork":
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
    own = getattr(spec.dataset, "decode", None) if is_leased(spec.dataset) else None
    steps = [step for step in (own, spec._asyncloader_options.decode) if step is not None]
    return Chain(steps) if len(steps) > 1 else steps[0] if steps else None


def _snapshot_every(spec: LoaderSpec[Any]) -> int:
    if is_leased(spec.dataset) and not spec.in_order:
        return 1  # who reads a stream again that was leased in another order finds other batches
    return spec._asyncloader_options.snapshot_every_n_steps or 0


def _replays(spec: LoaderSpec[Any]) -> bool:
    # What a lane was leased it is leased again: its stream is the same.
    return spec._asyncloader_options.resume == "replay" or spec._asyncloader_replays or is_leased(spec.dataset)


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
