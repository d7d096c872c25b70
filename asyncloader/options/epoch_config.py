"""Resolves a loader's options when an iterator begins: `EpochConfig` has all that the epoch asks of them.

Data path: options -> [epoch_config] -> state, epoch.

torch lets a user change most of its options until iteration begins. They are therefore read here, once, in one place;
afterwards nothing asks the loader. Ours are fixed and read as they were given to the constructor: a user's subclass may
have attributes of their names.

The most batches that a worker may have outstanding are `prefetch_factor` in torch. A worker that fetches samples
concurrently gets enough to keep `concurrency` samples in flight (or its threads busy), plus one that is finished and
waits, so that the slowest sample of a batch does not stall other batches' reads. A worker of a service gets two more,
for tasks and batches that are on the way. `workers/memory/ring_manager.py` limits their memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn, Self

import torch

from asyncloader.delivery.accelerator import DeviceLike
from asyncloader.options.auto import AutoWorkers, choice_of
from asyncloader.options.checks import max_restarts
from asyncloader.options.declaration import DEFAULTS, FIELD_NAMES, LoaderSpec, OnError, is_iterable
from asyncloader.ranks.topology import Topology, process_group, topology
from asyncloader.samplers.async_sampler import AsyncIndexSource, PositionSource
from asyncloader.samplers.distributed import OnUneven, plain_sampler, replicas
from asyncloader.service.client.remote_dataset import RemoteDataset
from asyncloader.sizes import optional_size
from asyncloader.telemetry.run_figures import CONCURRENCY
from asyncloader.workers.fetch.dataset_kinds import (
    MessagedDataset,
    assigns_shards,
    count_streams,
    fetches_batches,
    is_async_dataset,
)
from asyncloader.workers.fetch.dataset_state import is_stateful

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


_LOSS = (
    "Its random numbers begin anew: the states of its generators were lost with it, so random augmentations differ "
    "from those of an undisturbed run. With seed= they do not."
)
_OURS = frozenset((*DEFAULTS, *FIELD_NAMES))


class EpochConfig:
    """The options of one epoch, resolved. Made by `of`, and then fixed; holds no reference to the loader.

    A field of an option's name that `of` does not resolve is the option as given.
    """

    dataset: Any
    iterable: bool
    """Whether the dataset is iterated rather than indexed."""
    assigns_shards: bool
    """Whether the main process assigns the dataset's shards to the workers."""
    planned: bool
    """Whether the main process plans the dataset's epochs, and so reads from the store of its shards."""
    lane_of: Callable[[Any, int], int] | None
    """Which steps are best made by the same worker; None: any worker may make any."""
    concurrent: bool
    """Whether a copy of the dataset has several samples in flight, by awaiting them or in threads."""
    stateful: bool
    """Whether the dataset has a state of its own."""

    auto_collation: bool
    """Whether samples are put together to batches."""
    batch_size: int | None
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    batch_sampler: Any
    sampler: Any
    """The sampler of indices that determines the order; None: the loader has no sampler."""
    index_sampler: Any
    """What gives the indices of one batch after the other; in seeded mode this rank's."""
    source: AsyncIndexSource | None
    """The index sampler if it is an async one."""
    sampler_ranks: Topology | None
    """The rank and the number of ranks of a sampler that shards by itself; None: it does not."""
    free: bool
    """Whether any worker may make any batch."""
    generator: torch.Generator | None

    num_workers: int
    """Workers at the beginning of the epoch."""
    """Workers that there may be in the epoch."""
    loader_streams: int | None
    """Streams that an iterable dataset says that it has, of which each worker serves some, or which are read without
    workers; None: each worker reads a copy."""
    auto: AutoWorkers | None
    """The loader's own choice of the number; None: the user gave it."""
    """Whether the number changes while the epoch runs."""
    prefetch_factor: int | None
    least_credits: int
    """Batches that a copy of the dataset may have outstanding, however large they are: `prefetch_factor`; 1 without
    workers."""
    credits: int
    """Most batches that a copy of the dataset may have outstanding, while they are small."""
    persistent_workers: bool
    in_order: bool
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    multiprocessing_context: Any
    awaits_workers: bool
    """Whether `iter()` waits until the workers have begun, and raises an error of one that could not."""

    seed: int | None
    seeded: bool
    """Whether order and random numbers follow from a seed, rather than as in torch."""
    topology: Topology
    even_ranks: int
    """Number of ranks that share a map dataset's samples evenly and wait for one another; 1 in torch mode, and for
    streams, whose ranks agree on the end of the epoch instead."""
    group: Any
    """The process group of the ranks, if one was given."""
    on_uneven: OnUneven
    reorder_window: int
    """Batches that may be ready before an earlier batch; 0 where order or mode does not allow it."""
    exact: bool
    """Whether a state that cannot be resumed exactly is refused."""
    replays: bool
    """Whether a stream without a state may be read again from its beginning to resume it."""
    snapshot_every: int
    """Batches from one saved state of the sampler to the next; 0: none is saved."""
    dataset_snapshot_every: int
    """The same for a dataset that has a state."""

    concurrency: int
    """Samples that a copy of the dataset awaits at a time, if they are awaited."""
    fetch_threads: int
    """Threads in which a copy of a blocking map dataset fetches samples; 0: one after the other."""
    decode: Callable[[Any], Any] | None
    decode_threads: int
    ring_bytes: int | None
    worker_timeout: float | None
    worker_memory_limit: int | None
    workers: Any
    """A service that has the workers; None: they are processes of this machine."""
    max_restarts: int
    """How often each worker may be replaced."""
    loss: str
    """The state that is lost with a worker that is replaced, for the warning; empty: none."""
    on_error: OnError
    max_skipped_samples: int | None
    device: DeviceLike
    device_prefetch: int
    device_transform: Callable[[Any], Any] | None
    static_buffers: bool

    @classmethod
    def of(cls, loader: LoaderSpec[Any]) -> Self:
        """The options as they are now."""
        ours, dataset, index_sampler = loader._asyncloader_options, loader.dataset, loader._index_sampler
        iterable, assigned, seeded = is_iterable(loader), assigns_shards(dataset), ours.seed is not None
        exact = not (ours.allow_replay or loader._asyncloader_replays)
        awaited, stateful, batches = is_async_dataset(dataset), is_stateful(dataset), bool(loader._auto_collation)
        in_flight = CONCURRENCY if ours.concurrency is None else ours.concurrency
        threads = 0 if iterable or awaited else ours.concurrency or 0
        concurrent = awaited or threads > 0
        least, here = loader.prefetch_factor or 1, topology(loader)
        source = index_sampler if isinstance(index_sampler, AsyncIndexSource) else None
        positions = source if isinstance(source, PositionSource) else None
        sampler, batch_sampler = plain_sampler(loader), loader.batch_sampler
        every = ours.snapshot_every_n_steps or 0
        auto = choice_of(loader)
        number = loader.num_workers
        streams = count_streams(dataset) if iterable else None
        if streams is not None:
            number = min(number, streams)  # a further worker would have none to serve
        ahead = concurrent and not (iterable or stateful or positions is not None)
        credits = most_credits(
            dataset,
            getattr(batch_sampler, "batch_size", None) if batches else 1,
            least=least,
            concurrency=(threads or in_flight) if ahead else 0,
            threads=threads if batches else 0,
        )
        resolved: dict[str, Any] = {
            "dataset": dataset,
            "iterable": iterable,
            "assigns_shards": assigned,
            "planned": assigned or positions is not None,
            "lane_of": None if positions is None else positions.lane_of,
            "num_workers": number,
            "loader_streams": streams,
            "auto": auto,
            "concurrent": concurrent,
            "concurrency": in_flight,
            "stateful": stateful,
            "fetch_threads": threads,
            "least_credits": least,
            "credits": credits,
            "auto_collation": batches,
            "sampler": sampler,
            "sampler_ranks": replicas(sampler, batch_sampler),
            "index_sampler": index_sampler,
            "source": source,
            "free": positions is None and (source is not None or (seeded and not iterable)),
            "awaits_workers": loader._asyncloader_awaits_workers,
            "seeded": seeded,
            "topology": here,
            "even_ranks": here.world_size if seeded and not iterable else 1,
            "group": None if ours.group is None else process_group(ours.group),
            "reorder_window": ours.reorder_window
            if seeded and loader.in_order and not (iterable or positions is not None)
            else 0,
            "exact": exact,
            # A worker stream is assigned the same shards again, so replaying it gives the same samples.
            "replays": not exact or assigned,
            "snapshot_every": every,
            # After a resume unordered shards are assigned in another order: a replayed stream has other batches.
            "dataset_snapshot_every": 1 if assigned and not loader.in_order else every,
            "ring_bytes": optional_size("ring_bytes", ours.ring_bytes),
            "worker_memory_limit": optional_size("worker_memory_limit", ours.worker_memory_limit),
            "max_restarts": max_restarts(ours.max_worker_restarts, seeded=seeded),
            "loss": "" if seeded else dataset.loss if isinstance(dataset, MessagedDataset) else _LOSS,
        }
        config = cls()
        (names, values), (torchs, torchs_values) = _as_given(tuple(resolved))
        vars(config).update(zip(names, values(ours), strict=True))
        vars(config).update(zip(torchs, torchs_values(loader), strict=True))
        vars(config).update(resolved)
        return config

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"the options of an epoch are fixed: {name} cannot become {value!r}")


@functools.cache
def _as_given(resolved: tuple[str, ...]) -> list[tuple[list[str], Callable[[Any], tuple[Any, ...]]]]:
    """The names of the options that become fields as they are given, with a function that reads them: of ours, and of
    torch's.
    """
    names = [name for name in EpochConfig.__annotations__ if name not in resolved]
    both = [[name for name in names if (name in _OURS) == ours] for ours in (True, False)]
    return [(each, attrgetter(*each)) for each in both]
