"""Resolves a loader's options when an iterator begins: `EpochConfig` has all that the epoch asks of them.

Data path: options -> [epoch_config] -> state, epoch.

torch lets a user change most of its options until iteration begins. They are therefore read here, once, in one place;
afterwards nothing asks the loader. Ours are fixed and read as they were given to the constructor: a user's subclass may
have attributes of their names.

The most batches that a worker may have outstanding are `prefetch_factor` in torch. A worker that fetches samples
concurrently gets enough to keep `concurrency` samples in flight (or its threads busy), plus one that is finished and
waits, so that the slowest sample of a batch does not stall other batches' reads. A worker of a service gets two more,
for tasks and batches that are on the way. `workers/ipc/ring_manager.py` limits their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn, Self

import torch
from torch.utils.data import _DatasetKind as DatasetKind

from asyncloader.base.sizes import size
from asyncloader.base.topology import Topology, process_group, topology
from asyncloader.delivery.accelerator import DeviceLike
from asyncloader.options.auto import AutoWorkers, makes_threads
from asyncloader.options.checks import max_restarts
from asyncloader.options.declaration import OPTION_NAMES, OUR_OPTION_NAMES, LoaderSpec, OnError
from asyncloader.samplers.async_sampler import AsyncIndexSource, PositionSource
from asyncloader.samplers.distributed import OnUneven, plain_sampler, replicas
from asyncloader.service.client.remote_dataset import RemoteDataset
from asyncloader.telemetry.run_figures import CONCURRENCY
from asyncloader.workers.fetch.dataset_kinds import (
    MessagedDataset,
    assigns_shards,
    count_streams,
    fetches_batches,
    is_async_dataset,
)
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.source import THREADS

_ON_THE_WAY = 2


_LOSS = (
    "Its random numbers begin anew: the states of its generators were lost with it, so random augmentations differ "
    "from those of an undisturbed run. With seed= they do not."
)


class EpochConfig:
    """The options of one epoch, resolved. Made by `of`, and then fixed; holds no reference to the loader.

    A field of an option's name that `of` does not resolve is the option as given; options that no field declares are
    there, too.
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
    loader_streams: int | None
    """Streams that an iterable dataset says that it has, of which each worker serves some, or which are read without
    workers; None: each worker reads a copy."""
    auto: AutoWorkers | None
    """The loader's own choice of the number; None: the user gave it."""
    prefetch_factor: int
    """Batches that a copy of the dataset may have outstanding, however large they are; 1 without workers."""
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
    """A service that has the workers, or "threads"; None: they are processes of this machine."""
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
        iterable: bool = loader._dataset_kind == DatasetKind.Iterable
        assigned, seeded = assigns_shards(dataset), ours.seed is not None
        exact = not (ours.allow_replay or loader._asyncloader_replays)
        awaited, stateful, batches = is_async_dataset(dataset), is_stateful(dataset), bool(loader._auto_collation)
        in_flight = CONCURRENCY if ours.concurrency is None else ours.concurrency
        threads = 0 if iterable or awaited else ours.concurrency or 0
        concurrent = awaited or threads > 0
        source = index_sampler if isinstance(index_sampler, AsyncIndexSource) else None
        positions = source if isinstance(source, PositionSource) else None
        sampler, here = plain_sampler(loader), topology(loader)
        every = ours.snapshot_every_n_steps or 0
        auto = loader._asyncloader_choice
        number = loader.num_workers if auto is None else auto.number
        streams = count_streams(dataset) if iterable else None
        if streams is not None:
            number = min(number, streams)  # a further worker would have none to serve
        prefetch = 1 if loader.prefetch_factor is None else loader.prefetch_factor
        credits = max(1, prefetch)  # 0 is refused once workers begin
        # Not for streams, which are read one sample after the other, and datasets with a state of their own, which
        # would be saved further ahead.
        if concurrent and not (iterable or stateful or positions is not None):
            credits = max(credits, _batches_in_flight(loader, threads or in_flight, threads))
        if isinstance(dataset, RemoteDataset) and dataset.service.remote:
            credits += _ON_THE_WAY
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
            "prefetch_factor": prefetch,
            "credits": credits,
            "auto_collation": batches,
            "sampler": sampler,
            "sampler_ranks": replicas(sampler, loader.batch_sampler),
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
            "ring_bytes": ours.ring_bytes and size("ring_bytes", ours.ring_bytes),
            "worker_memory_limit": ours.worker_memory_limit and size("worker_memory_limit", ours.worker_memory_limit),
            "workers": THREADS if makes_threads(loader.multiprocessing_context) else ours.workers,
            "max_restarts": max_restarts(ours.max_worker_restarts, seeded=seeded),
            "loss": "" if seeded else dataset.loss if isinstance(dataset, MessagedDataset) else _LOSS,
        }
        config = cls()
        vars(config).update(vars(ours))
        vars(config).update(zip(_TORCHS, _torchs_options(loader), strict=True))
        vars(config).update(resolved)
        return config

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"the options of an epoch are fixed: {name} cannot become {value!r}")


_TORCHS = [name for name in OPTION_NAMES if name in EpochConfig.__annotations__ and name not in OUR_OPTION_NAMES]
_torchs_options = attrgetter(*_TORCHS)


def _batches_in_flight(loader: LoaderSpec[Any], samples: int, threads: int) -> int:
    """The batches that keep this number of samples in flight, and one more, which is finished and waits; 0: unknown."""
    size: object = getattr(loader.batch_sampler, "batch_size", None) if loader._auto_collation else 1
    if not isinstance(size, int) or size < 1:
        return 0
    if threads and loader._auto_collation and fetches_batches(loader.dataset):
        size = 1  # one thread fetches a whole batch
    return -(-samples // size) + 1
