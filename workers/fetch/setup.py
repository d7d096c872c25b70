"""Defines the set-up that a worker is started with, and seeds its process-global random numbers exactly as torch does.

Data path: worker start-up, before the first fetch.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_random_seed

from asyncloader.base.events import Cursor
from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.fetch.sample_errors import ErrorPolicy


class EpochStart(NamedTuple):
    """The state with which a worker begins an epoch.

    Attributes:
        shared_seed: the seed that all workers and ranks share, for torch's datapipes; None for other datasets.
        epoch: its number.
        epoch_set: whether `set_epoch` was called on the consumer's copy: always in seeded mode, else by the user.
        cursor: the state of its copy of the dataset to begin with; None for the beginning.
        skip: batches to read and discard after that; those that raised before count, too, unless shards are assigned.
        errors: of assigned shards: number of errors behind those batches that have been delivered. Where they come
            again, they are passed over.
        stream_key: seed of the worker's shuffle buffer, where the main process assigns shards.
        message: the message of a `MessagedDataset` for this epoch; empty for other datasets.
        streams: where each stream begins that this worker serves, in the order of their numbers; empty for a dataset
            that does not say that it has streams. The fields above are then those of the first.
    """

    shared_seed: int | None = None
    epoch: int = 0
    epoch_set: bool = False
    cursor: Cursor | None = None
    skip: int = 0
    errors: int = 0
    stream_key: int = 0
    message: bytes = b""
    streams: tuple[EpochStart, ...] = ()


def for_worker(starts: Sequence[EpochStart]) -> EpochStart:
    """Return the start of a worker that serves these streams."""
    return starts[0]._replace(streams=tuple(starts))


def by_worker(starts: Sequence[EpochStart], workers: int) -> list[EpochStart]:
    """Return the start of each worker, from those of all streams: of this number of workers, each serves every
    ``workers``-th stream.
    """
    return [for_worker(starts[worker::workers]) for worker in range(workers)]


def by_stream(starts: Sequence[EpochStart]) -> list[EpochStart]:
    """Return the starts of all streams: the inverse of `by_worker`."""
    number = sum(len(start.streams) for start in starts)
    return [starts[stream % len(starts)].streams[stream // len(starts)] for stream in range(number)]


class WorkerSetup(NamedTuple):
    """The set-up that all workers of a pool share. Pickled once per pool."""

    dataset: Any
    iterable: bool
    auto_collation: bool
    batch_size: int | None
    collate_fn: Any
    drop_last: bool
    base_seed: int
    worker_init_fn: Any
    num_workers: int
    concurrency: int
    starts: Sequence[EpochStart]
    """One per worker, for the first epoch."""
    snapshot_every: int
    """Number of batches after which the state of a stateful dataset is taken; 0: never."""
    seeded: SeededSetup | None = None
    """None in torch mode."""
    attachment: int = 0
    """The pool's number for the epoch in which the worker begins; more than 0 for a replacement in a later one."""
    memory_limit: int | None = None
    """Bytes of private memory that a worker may grow by before it is replaced."""
    rng_state: bytes = b""
    """RNG state of the worker's predecessor, if the predecessor could still save it."""
    replays: bool = False
    """A stream without a state may be read again from its beginning."""
    policy: ErrorPolicy | None = None
    """What to do with samples that raise; None: they fail their batch."""
    fetch_threads: int = 0
    """Threads that fetch the samples of a blocking map dataset; 0: one sample after the other."""
    decode: Any = None
    """The user's function from a sample as read to a sample as collated; None: samples are not decoded."""
    decode_threads: int = 0
    """Threads that run `decode`, where samples are awaited or fetched by threads; 0: inline."""
    workers: int = 1
    """Workers that serve the streams of a dataset that says that it has streams: `num_workers` is then their number."""


def stream_in_words(setup: WorkerSetup, number: int, *, in_worker: bool) -> str | None:
    """Return which stream a copy of the dataset is, for errors' texts; None: the only one, without workers."""
    if setup.starts and setup.starts[0].streams:
        return f"stream {number}"
    return f"worker {number}'s stream" if in_worker else None


class LateSetup(Protocol):
    """A set-up that is made in the worker. What that raises answers every task."""

    def load(self) -> WorkerSetup:
        """Make it."""
        ...


class SeededSetup(NamedTuple):
    """The workers' part of the seeded mode's options.

    Attributes:
        seed: the loader's.
        replicas: the difference between the positions of neighbouring samples of a batch.
        first_stream: number of the first copy's stream among the streams of all ranks, for iterable datasets.
        seed_collate: whether collation is a user's function, which may draw random numbers.
    """

    seed: int
    replicas: int
    first_stream: int
    seed_collate: bool


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed random, torch and numpy as a torch worker does; return the worker's seed.

    Source: ``torch.utils.data._utils.worker._worker_loop``. numpy's seed is mixed by `_generate_state` so that it
    differs from that of `random`, which uses the same generator.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, worker_id))
    return seed


def seed_cpu_generators(base_seed: int, stream: int) -> None:
    """Seed random, torch and numpy as `seed_worker`, in the training process: without the accelerators' generators,
    which its own code draws from.
    """
    random.seed(base_seed + stream)
    torch.default_generator.manual_seed(base_seed + stream)
    np.random.seed(torch_worker._generate_state(base_seed, stream))


def install_worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make `torch.utils.data.get_worker_info` work in this process."""
    set_worker_info(make_worker_info(worker_id, num_workers, seed, dataset))


def set_worker_info(info: Any) -> None:
    """Make `get_worker_info` return this in this process."""
    # torch has no public way to set it: its own workers assign the same variable.
    torch_worker._worker_info = info


def make_worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> Any:
    """Return what `torch.utils.data.get_worker_info` returns in this worker."""
    return torch_worker.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def reseeded_datapipe(dataset: Any, shared_seed: int | None) -> Any:
    """Seed a datapipe for an epoch, as torch does; other datasets are returned as they are."""
    if isinstance(dataset, IterDataPipe):
        generator = torch.Generator()
        generator.manual_seed(shared_seed or 0)
        dataset = apply_random_seed(dataset, generator)
    return dataset


class Links(NamedTuple):
    """The descriptors that a worker shares with the main process; each an `InheritedFd`.

    Attributes:
        control: the worker's end of the control socket.
        lifeline: read end of the pipe whose closing kills the worker.
        stacks: write end of the pipe for stack traces.
        parent: the main process's pidfd; None where the system has no pidfds.
        records: the segment of the worker's `Recorder`.
    """

    control: Any
    lifeline: Any
    stacks: Any
    parent: Any
    records: Any


# ------------------------------------------------------------------------------------ the user's `worker_init_fn`


def call_worker_init(init: Callable[[int], Any] | None, number: int) -> None:
    """Call `worker_init_fn` with the number of a worker, or of a stream. None: nothing is called.

    Raises:
        TypeError: it returned an awaitable.
        Exception: what it raised.
    """
    if init is None:
        return
    try:
        returned = init(number)
    except Exception as error:
        add_note(error, f"while calling worker_init_fn({number})")
        raise
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # otherwise Python would warn that it was never awaited
        raise TypeError(
            "worker_init_fn returned an awaitable, but it is called, and not awaited: await in the dataset's __aenter__"
        )
