"""Sets up one epoch from its options: random numbers and sampler order, scheduler, and the workers' setup.

Data path: options -> [plan] -> pool, scheduler, iterators.

`make_scheduler` builds the state machine of the epoch; `worker_setup` and `make_pool` build the workers;
`open_assignment` plans the assignment of shards, and counts the samples of fixed streams.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate, default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from asyncloader.epoch.scheduler import Scheduler
from asyncloader.epoch.stream_scheduler import StreamScheduler, StreamTurns
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.async_sampler import PositionSource
from asyncloader.state.progress import Progress
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.assignment_client import AssignmentSource
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.ipc.ring_manager import KeptRings
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.source import THREADS, LocalWorkers, WorkerSource

if TYPE_CHECKING:
    from asyncloader.remote.assignment_state import EpochAssignment
    from asyncloader.remote.shard_splitting import EpochPlan
    from asyncloader.remote.worker_stream import LocalAssignments


def worker_context(config: EpochConfig) -> Any:
    """The multiprocessing context; torch's default when none was given. For remote datasets "forkserver" replaces
    "fork": the main process has read from the store, and a client's threads and connections do not survive a fork.
    """
    if config.multiprocessing_context is not None:
        return config.multiprocessing_context
    if config.planned and torch.multiprocessing.get_start_method() == "fork":
        return torch.multiprocessing.get_context("forkserver")
    return torch.multiprocessing


def start_method(config: EpochConfig) -> str:
    """The start method of the workers; "threads" if they are threads, "service" if they are elsewhere."""
    if config.workers == THREADS:
        return "threads"
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
        base_seed: worker i, or stream i, is seeded with ``base_seed + i``.
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
        num_workers=config.loader_streams or config.num_workers,
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
        workers=len(starts),
    )


def replicas_of(config: EpochConfig, torch_iter: _BaseDataLoaderIter) -> int:
    """Distance between the positions of neighbouring samples of a batch."""
    share = getattr(torch_iter._index_sampler, "share", None)
    # Where the ranks share batches rather than samples, the samples of a batch are neighbours.
    return 1 if config.seed is None or share is None or share.of_batches else int(share.replicas)


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
    return SeededSetup(
        seed=config.seed,
        replicas=replicas_of(config, torch_iter),
        first_stream=config.topology.rank * (config.loader_streams or max(1, config.num_workers)),
        # torch's own functions draw no random numbers.
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
        config.credits,
        config.ring_bytes,
        concurrent=config.concurrent,
        reorder_window=config.reorder_window,
        worker_timeout=config.worker_timeout,
        least_credits=config.prefetch_factor,
        kept=kept,
        statistics=statistics,
    )


def _worker_source(config: EpochConfig) -> WorkerSource:
    if config.workers is None:
        return LocalWorkers(
            worker_context(config),
            replaces=config.max_restarts > 0 or config.worker_memory_limit is not None,
            # The user did not choose the fork server: see `worker_context`.
            passes_environ=config.planned and config.multiprocessing_context is None,
        )
    # Not at the top: only a loader with such workers needs these.
    if config.workers == THREADS:
        from asyncloader.workers.thread_source import ThreadWorkers

        return ThreadWorkers()
    from asyncloader.service.client.remote_workers import ServiceWorkers

    return ServiceWorkers(config.dataset, config.credits)


def make_scheduler(config: EpochConfig, first: int) -> Scheduler:
    """A scheduler for one epoch, in which this worker comes first; of a dataset with streams, this stream."""
    options: dict[str, Any] = {
        "workers": config.num_workers,
        "credits": config.credits,
        "in_order": config.in_order,
        "max_restarts": config.max_restarts,
        "concurrent": config.concurrent,
    }
    if config.loader_streams is not None:
        return StreamScheduler(StreamTurns(config.loader_streams, first, config.num_workers), **options)
    return Scheduler(
        iterable=config.iterable,
        # torch defines which worker makes which batch. That matters in torch mode and for iterable datasets, whose
        # copies are read in turn. In seeded mode and with an async sampler any worker may take a task.
        assignment="least_loaded" if config.free else "round_robin",
        reorder_window=config.reorder_window,
        first_worker=first,
        lane_of=config.lane_of,
        **options,
    )


async def open_assignment(
    progress: Progress, starts: Sequence[EpochStart]
) -> tuple[EpochAssignment | None, Sequence[EpochStart]]:
    """Plan an epoch.

    Args:
        progress: of the epoch, with its options; saves the assignment from now on.
        starts: where each worker begins; a single one for the main process.

    Returns:
        The epoch's assignment, None for other datasets; and the starts, with the seeds of the shuffle buffers.

    Raises:
        StateError: the epoch resumes from a state of other shards.
        ValueError, TransportError, ShardError: there are no shards, or they cannot be listed.
    """
    config = progress.config
    if isinstance(config.source, PositionSource):
        await config.source.plan(progress)
    if not config.assigns_shards:
        return None, starts
    from asyncloader.remote.assignment_state import EpochAssignment, saved_key, stream_key
    from asyncloader.remote.catalog import list_in_words
    from asyncloader.remote.shard_splitting import RANGES_PER_WORKER

    dataset, here, workers = config.dataset, config.topology, len(starts)
    saved = progress.saved_assignment
    # An epoch that resumes keeps the key of its first run, from which its shards were shared out.
    key = progress.assignment_key if saved is None else saved_key(saved)
    assert key is not None
    if progress.agreement is not None and not progress.agreement.listed:
        await dataset.list_together(progress.agreement)
    plan: EpochPlan = await dataset.plan(
        workers, here.rank, here.world_size, derive(key, "shards"), common=config.seeded
    )
    assignments = EpochAssignment(
        dataset.shard_urls,
        plan,
        starts,
        saved,
        key=key,
        ordered=config.in_order,
        shuffle=getattr(dataset, "shuffle_buffer", 0),
    )
    progress.assignment = assignments
    if progress.agreement is not None:
        reads = list_in_words(dataset.shard_urls)
        # How many shards are cut, and in seeded mode the samples' random numbers, depend on the workers of a rank.
        if config.seeded or len(dataset.shard_urls) < RANGES_PER_WORKER * workers * here.world_size:
            reads += f" by {workers} workers" if workers > 1 else " by 1 worker"
        progress.agreement.reads = reads
    return assignments, [
        start._replace(stream_key=stream_key(key, here.rank, workers, worker)) for worker, start in enumerate(starts)
    ]


class InlineAssignments:
    """`AssignmentProvider` of a reader in the main process.

    Args:
        progress: of the epoch.
        start: where the reader begins.
    """

    def __init__(self, progress: Progress, start: EpochStart) -> None:
        self._arguments = progress, [start]
        self._source: LocalAssignments | None = None

    async def prepare(self) -> None:
        """Plan the epoch; errors as `open_assignment`."""
        assignments, (start,) = await open_assignment(*self._arguments)
        if assignments is not None:
            from asyncloader.remote.worker_stream import LocalAssignments

            self._source = LocalAssignments(assignments.assigner, start.stream_key)

    def source(self, _: EpochStart) -> AssignmentSource:
        """Return the reader's source. As `AssignmentProvider.source`."""
        assert self._source is not None, "prepare() was not awaited"
        return self._source
