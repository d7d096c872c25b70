"""Defines the loaders' options: torch's constructor and checks, and ours.

Data path: none; read before the first stage starts.

`LoaderSpec` is a `torch.utils.data.DataLoader` with our options. Both loaders are based on it: the sync one *is* one,
the async one *has* one. Options that torch lets a user change after construction are read when iteration starts.

`most_credits` computes how many batches a worker has outstanding. In torch that is `prefetch_factor`. A worker that
fetches samples concurrently gets enough batches to keep `concurrency` samples in flight (or `fetch_threads` threads
busy), plus one that is finished and waits, so that the slowest sample of a batch does not stall other batches' reads.
`workers/memory/ring_manager.py` limits their memory.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import _DatasetKind as DatasetKind

from asyncloader.cpus import affinity, cpu_quota
from asyncloader.delivery.transfer import DEFAULT_PREFETCH_DEVICE, DeviceLike
from asyncloader.option_checks import (
    check_concurrency_options,
    check_device_options,
    check_fault_options,
    check_seed_options,
    is_seed,
)
from asyncloader.samplers.async_sampler import AsyncIndexSource, as_async_source
from asyncloader.samplers.distributed import OnUneven, rank_view, topology
from asyncloader.samplers.generators import drawing_generator
from asyncloader.samplers.seeded import SeededSampler
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import fetches_batches, is_async_stream, is_concurrent
from asyncloader.workers.fetch.dataset_state import is_stateful

__all__ = [
    "DEFAULT_CONCURRENCY",
    "DEFAULT_MAX_BAD_SAMPLES",
    "DEFAULT_RUN_AHEAD",
    "OPTION_NAMES",
    "OUR_OPTION_NAMES",
    "BadSamples",
    "LoaderSpec",
    "OnError",
    "async_index_source",
    "default_sampler",
    "is_iterable",
    "max_restarts",
    "most_credits",
]


def most_credits(
    spec: torch.utils.data.DataLoader[Any], concurrency: int, fetch_threads: int, *, iterable: bool
) -> int:
    """Most batches that one copy of the dataset may have outstanding, while they are small.

    At least `prefetch_factor` (1 without workers). Not more for streams, which are read one sample after the other; for
    datasets with a state of their own, which would be saved further ahead; and for batches of unknown size.
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
        size = 1  # one thread fetches a whole batch
    batches: int = -(-in_flight // size)
    return max(least, batches + 1)


OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Any, Exception], Any]
BadSamples: TypeAlias = Literal["short", "refill"]

DEFAULT_MAX_BAD_SAMPLES = 1000

_SEEDED_RESTARTS = 3


def max_restarts(given: int | None, *, seeded: bool) -> int:
    """How often a worker may be replaced in an epoch: as given; by default 3 times in seeded mode, else never."""
    if given is not None:
        return given
    return _SEEDED_RESTARTS if seeded else 0


T_co = TypeVar("T_co", covariant=True)

DEFAULT_CONCURRENCY = 256
DEFAULT_RUN_AHEAD = 16


class OurOptions:
    """The options that torch's loader does not have, as given to the constructor. Fixed; see `LoaderSpec`."""

    ring_bytes: int | None
    concurrency: int
    fetch_threads: int
    decode: Callable[[Any], Any] | None
    decode_threads: int
    seed: int | None
    rank: int | None
    world_size: int | None
    on_uneven: OnUneven
    resume: Literal["exact", "replay"]
    snapshot_every_n_steps: int | None
    run_ahead: int
    worker_timeout: float | None
    max_worker_restarts: int | None
    on_error: OnError
    bad_samples: BadSamples
    max_bad_samples: int | None
    worker_memory_limit: int | None
    device: DeviceLike
    prefetch_device: int
    device_transform: Callable[[Any], Any] | None
    static_buffers: bool

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class LoaderSpec(torch.utils.data.DataLoader[T_co], OurOptions):
    """torch's loader with torch's options and ours. All can be read, unmodified, under their own names. The instance's
    `vars` hold those of our options that differ from the defaults, for code that makes a loader from them.

    A subclass may have attributes of any name, also of the name of one of our options; such an attribute is the
    subclass's own. Our options count as they were given to the constructor, and are read from `_asyncloader_options`.

    Args:
        ring_bytes: upper bound of each worker's ring in bytes, at least 4096 a slot; default None: the ring follows
            the batches seen. Larger batches then go through memory of their own, once each.
        concurrency: samples that a worker awaits at a time, over all its outstanding batches, for datasets with
            ``async`` methods; default 256.
        fetch_threads: threads per worker that fetch samples of a blocking map dataset, which must then be safe to call
            from several threads at a time; default 0: one sample after the other.
        decode: a function that turns a sample of the dataset into the one that is collated. It runs with the sample's
            random numbers. Default None.
        decode_threads: threads per worker for `decode`, if samples are awaited or fetched by threads; default 1; 0: in
            the event loop, or in the thread that fetched.
        seed: 0 to 2**64 - 1: seeded mode, in which order and random numbers depend on the seed, the epoch and the
            sample's position alone. Default None: torch mode.
        rank, world_size: this process's rank, and the number of processes that train together, in seeded mode; default
            None: torch.distributed's if it is initialized, else a single process.
        on_uneven: what to do with samples that the ranks cannot share evenly at the epoch's end: "drop" (default)
            leaves out fewer than `world_size`, "repeat" repeats fewer than `world_size`, "pad" fills every rank's last
            batch to `batch_size`, "error" raises.
        resume: "exact" (default) refuses a state that cannot be resumed exactly; "replay" reads a stream without a
            state of its own again from its beginning, and drops what was delivered.
        snapshot_every_n_steps: stateful samplers and streams are asked for their states every so many batches (default
            1); a resumed loader reads and drops the batches since the last one. 0 or None: never.
        run_ahead: in seeded mode, batches that may be ready before an earlier, slower one (default 16), as far as the
            rings have room.
        worker_timeout: seconds that a worker may take for one task before it is killed and replaced (start-up may take
            60 in any case); default None: no limit.
        max_worker_restarts: how often a worker that dies is replaced in an epoch, and its tasks repeated; default None:
            3 times in seeded mode, where the batches stay the same, never in torch mode.
        on_error: what to do with samples that raise: "raise" (default); "skip" leaves them out; a function of an index
            and the exception returns a substitute or raises. It is called where the sample would have been made.
        bad_samples: with ``on_error="skip"``, a batch that lost samples is "short" (default), or gets substitutes drawn
            from the seed, the epoch and the position ("refill"; seeded mode, map datasets with a length).
        max_bad_samples: how many samples of an epoch may raise before `TooManyBadSamples` (default 1000); None: any
            number.
        worker_memory_limit: bytes by which a worker's private memory may grow since its start before it is replaced
            between two tasks; default None: no limit. A worker whose stream could not be resumed (no state,
            ``resume="exact"``) is not replaced.
        device: the device where batches are delivered, as torch takes it ("cuda", "cuda:1", a `torch.device`); default
            None: in the CPU's memory. For CUDA they are copied straight from page-locked rings, ahead of the consumer.
        prefetch_device: batches that may be on the device, or in flight, before the consumer asks; default 1.
        device_transform: a function from a batch on the device to the one that is delivered, run in a thread and a
            stream of the loader's, so not one of ``torch.compile(mode="reduce-overhead")``; default None.
        static_buffers: deliver every batch in the same tensors, for CUDA graphs (each of the first 32 combinations of
            shapes has its own); a batch is then valid until the next one is taken. Default False.

    Raises:
        ValueError, TypeError: torch's, in torch's order and words, then ours.
    """

    _asyncloader_replays = False
    """Whether streams are replayed whatever `resume` says."""

    _asyncloader_awaits_workers = False
    """Whether `iter()` waits until the workers have begun, and raises an error of one that could not."""

    _asyncloader_options: OurOptions

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
        fetch_threads: int = 0,
        decode: Callable[[Any], Any] | None = None,
        decode_threads: int = 1,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        on_uneven: OnUneven = "drop",
        resume: Literal["exact", "replay"] = "exact",
        snapshot_every_n_steps: int | None = 1,
        run_ahead: int = DEFAULT_RUN_AHEAD,
        worker_timeout: float | None = None,
        max_worker_restarts: int | None = None,
        on_error: OnError = "raise",
        bad_samples: BadSamples = "short",
        max_bad_samples: int | None = DEFAULT_MAX_BAD_SAMPLES,
        worker_memory_limit: int | None = None,
        device: DeviceLike = None,
        prefetch_device: int = DEFAULT_PREFETCH_DEVICE,
        device_transform: Callable[[Any], Any] | None = None,
        static_buffers: bool = False,
    ) -> None:
        stream = is_async_stream(dataset)
        ours = None if stream else default_sampler(dataset, seed, shuffle, sampler, batch_sampler)
        if ours is not None:
            sampler, shuffle = ours, None
        super().__init__(
            _AsyncStream() if stream else dataset,  # so that torch checks the arguments as for an iterable dataset
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
            self.__dict__["dataset"] = dataset  # torch forbids assigning it from here on
        if ring_bytes is not None and (not isinstance(ring_bytes, int) or ring_bytes < 1):
            raise ValueError(
                f"ring_bytes should be a positive number of bytes or None, but got ring_bytes={ring_bytes!r}"
            )
        check_concurrency_options(
            concurrency=concurrency,
            fetch_threads=fetch_threads,
            decode=decode,
            decode_threads=decode_threads,
            dataset=dataset,
            iterable=is_iterable(self),
        )
        check_seed_options(
            iterable=is_iterable(self),
            seed=seed,
            generator=generator,
            rank=rank,
            world_size=world_size,
            on_uneven=on_uneven,
            resume=resume,
            snapshot_every_n_steps=snapshot_every_n_steps,
            run_ahead=run_ahead,
        )
        check_fault_options(
            worker_timeout=worker_timeout,
            max_worker_restarts=max_worker_restarts,
            on_error=on_error,
            bad_samples=bad_samples,
            max_bad_samples=max_bad_samples,
            worker_memory_limit=worker_memory_limit,
            seed=seed,
            dataset=dataset,
            iterable=is_iterable(self),
        )
        check_device_options(
            device=device,
            prefetch_device=prefetch_device,
            device_transform=device_transform,
            static_buffers=static_buffers,
        )
        self._asyncloader_options = OurOptions(
            ring_bytes=ring_bytes,
            concurrency=concurrency,
            fetch_threads=fetch_threads,
            decode=decode,
            decode_threads=decode_threads,
            seed=seed,
            rank=rank,
            world_size=world_size,
            on_uneven=on_uneven,
            resume=resume,
            snapshot_every_n_steps=snapshot_every_n_steps,
            run_ahead=run_ahead,
            worker_timeout=worker_timeout,
            max_worker_restarts=max_worker_restarts,
            on_error=on_error,
            bad_samples=bad_samples,
            max_bad_samples=max_bad_samples,
            worker_memory_limit=worker_memory_limit,
            device=device,
            prefetch_device=prefetch_device,
            device_transform=device_transform,
            static_buffers=static_buffers,
        )
        for name, value in vars(self._asyncloader_options).items():
            owner = next(base for base in type(self).__mro__ if name in vars(base))
            if owner is OurOptions and name not in vars(self) and value != vars(OurOptions)[name]:
                setattr(self, name, value)  # else the name is the subclass's, or the class attribute has the default
        self.__dict__["_asyncloader_maker"] = os.getpid()  # the process that made it; copies do not have this

    @property
    def generator(self) -> torch.Generator | None:
        """torch's argument; in seeded mode, while an iterator is made, a generator of the seed."""
        return drawing_generator(self) or vars(self).get("generator")

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        vars(self)["generator"] = generator

    @property
    def _index_sampler(self) -> Any:
        # torch's iterator calls `iter()` on it; for an async sampler that is empty, and a task of the loop reads it.
        plain = super()._index_sampler
        source = as_async_source(plain)
        if self._asyncloader_options.seed is None or is_iterable(self):
            return plain if source is None else source
        if source is None:
            return rank_view(self, plain)
        source.share, source.seeded = rank_view(self, plain).share, True
        return source

    def __len__(self) -> int:
        """Number of batches in an epoch. Approximate on several ranks that share a stream's shards, as these differ in
        size.

        Raises:
            TypeError: the number is unknown.
        """
        ranks = topology(self).world_size
        if ranks == 1 or not (is_iterable(self) and assigns_shards(self.dataset)):
            return super().__len__()
        share = len(self.dataset) // ranks  # type: ignore[arg-type]
        size = self.batch_size or 1
        return share // size if self.drop_last else -(-share // size)

    def _asyncloader_workers_begin(self) -> None:
        """Hook: called before workers start for an iterator of this loader."""

    def check_worker_number_rationality(self) -> None:
        """Give torch's warning about too many workers, but also consider a container's CPU quota."""
        quota = cpu_quota()
        if not self.num_workers or quota is None or quota >= affinity():
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


def default_sampler(dataset: Any, seed: int | None, shuffle: Any, sampler: Any, batch_sampler: Any) -> Any:
    """The default sampler of seeded mode; None if the user gave one, or there is nothing to sample."""
    if not is_seed(seed) or sampler is not None or batch_sampler is not None or isinstance(dataset, IterableDataset):
        return None
    assert seed is not None
    return SeededSampler(dataset, seed, shuffle=bool(shuffle))


class _AsyncStream(IterableDataset[Any]):
    """Stands for an asynchronous stream of another class while torch's constructor checks the dataset."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("an asynchronous stream cannot be iterated with a plain for")


OPTION_NAMES = tuple(inspect.signature(LoaderSpec).parameters)
"""Every argument of the loaders; each but `shuffle`, which becomes a sampler, is an attribute under the same name."""

OUR_OPTION_NAMES = tuple(OurOptions.__annotations__)
"""The options that torch's loader does not have."""

for _name in OUR_OPTION_NAMES:
    setattr(OurOptions, _name, inspect.signature(LoaderSpec).parameters[_name].default)

LoaderSpec.__init__.__qualname__ = "DataLoader.__init__"  # what Python's own errors about arguments call it


# Functions, not attributes: a user's subclass of the loader may have attributes of any name.


def is_iterable(spec: LoaderSpec[Any]) -> bool:
    """Whether the dataset is iterated rather than indexed."""
    return bool(spec._dataset_kind == DatasetKind.Iterable)


def async_index_source(spec: LoaderSpec[Any]) -> AsyncIndexSource | None:
    """The index sampler if it is an async one, else None."""
    sampler = spec._index_sampler
    return sampler if isinstance(sampler, AsyncIndexSource) else None
