"""Declares the figures of `stats()`: each key once, with its kind, unit and meaning. Pure.

Data path: none; read by `counters`, `statistics` and `metrics`. docs/reference/statistics.md has the same tables.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["total", "now", "derived"]


class Figure(NamedTuple):
    """A key of `stats()`.

    Attributes:
        kind: ``"total"`` only grows, ``"now"`` is a momentary value, ``"derived"`` is computed from others.
        unit: its unit.
        help: its meaning.
        group: the part of the key before the slash.
        counted: whether it is an attribute of `Statistics`; else `Statistics.snapshot` computes it.
    """

    kind: Kind
    unit: str
    help: str
    group: str = "data"
    counted: bool = False


def _counted(kind: Kind, unit: str, meaning: str, group: str = "data") -> Any:
    return Figure(kind, unit, meaning, group, counted=True)


class LoaderFigures:
    """The figures of a loader but those of its transports, nodes and stages, in the order of `stats()`.

    Those with a type are attributes of `Statistics`, which begin with 0 and are added to where they happen.
    """

    __slots__ = ()

    batches: int = _counted("total", "batches", "handed to the consumer since the loader was made")
    samples: int = _counted("total", "samples", "in those batches, as far as the batch size says")
    bytes: int = _counted("total", "bytes", "of tensors in those batches")
    wait_s: float = _counted(
        "total",
        "s",
        "that the consumer spent in `next` or `anext`, the current call included: waiting, taking a batch, and in the "
        "sampler",
    )
    wait_frac = Figure("derived", "0 to 1", "the share of waiting in the time spent iterating")
    batches_per_sec = Figure("derived", "1/s", "over the time spent iterating")
    samples_per_sec = Figure("derived", "1/s", "over the time spent iterating")
    bytes_per_sec = Figure("derived", "B/s", "over the time spent iterating")
    queue_depth = Figure("now", "batches", "ready and not yet taken")
    prefetch_depth: int = _counted(
        "now",
        "batches",
        "that each worker may have outstanding, as large as batches are; without workers: this process, with an async "
        "dataset or `concurrency`",
    )
    num_workers: int = _counted("now", "workers", "that make batches; without workers 0")
    time_to_first_batch_s: float = _counted("now", "s", "from `iter()` to the first batch of the latest epoch")
    startup_s: float = _counted("total", "s", "to the first batch, of all epochs that had to start workers")
    worker_busy_frac = Figure("derived", "0 to 1", "the share of their time that the workers spent on samples")
    oversize_batches: int = _counted(
        "total", "batches", "that bypass the ring, because `ring_bytes` allows no slot of their size"
    )
    ring_copies: int = _counted("total", "batches", "copied out of a ring because the consumer held its slots")
    worker_restarts: int = _counted("total", "workers", "that died, or were too late, and were replaced")
    worker_retirements: int = _counted(
        "total", "workers", "replaced because they had grown beyond `worker_memory_limit`"
    )
    skipped_samples: int = _counted(
        "total", "samples", "that raised with `on_error` set, substitutes that raised too included"
    )
    refilled_samples: int = _counted("total", "samples", 'of those, replaced by another sample (`on_error="refill"`)')
    page_locked_bytes: int = _counted(
        "now", "bytes", "of rings that were page-locked for the `device`, since the loader was made", "device"
    )
    page_lock_s: float = _counted("total", "s", "that this took", "device")
    staged_batches: int = _counted(
        "total", "batches", "of workers that were not copied to the `device` straight from a page-locked ring", "device"
    )
    dropped_samples = Figure(
        "total",
        "samples",
        "left out at the ends of epochs, over all ranks, because these could not share them evenly; an estimate for "
        "shards whose samples are not counted",
    )
    repeated_samples = Figure("total", "samples", "given a second time there, over all ranks")


_OF_LOADER: dict[str, Figure] = {name: each for name, each in vars(LoaderFigures).items() if isinstance(each, Figure)}

COUNTED = tuple(name for name, figure in _OF_LOADER.items() if figure.counted)
"""The attributes of `Statistics` that are keys of `stats()`."""

TOTALS = tuple(name for name in COUNTED if _OF_LOADER[name].kind == "total")
"""Those that only grow."""

KEY_NAMES: dict[str, str] = {f"{figure.group}/{name}": name for name, figure in _OF_LOADER.items()}
"""The keys of these figures in `stats()`, with their names."""

STORE_FIGURES: dict[str, Figure] = {
    "requests": Figure("total", "requests", "sent to stores by workers and main process, retries included"),
    "bytes": Figure("total", "bytes", "received from stores"),
    "retries": Figure("total", "requests", "that were tried again: after 503s, resets, stalls"),
    "resumed": Figure("total", "downloads", "that went on where they had broken, by range"),
    "given_up": Figure("total", "requests", "that failed in the end, although the failure was retryable"),
    "retry_wait_s": Figure("total", "s", "of back-off, summed over the requests"),
    "cache_hits": Figure("total", "reads", "given from `cache_dir`"),
    "cache_misses": Figure("total", "reads", "that went to the store although a cache was set"),
    "cache_bytes": Figure("total", "bytes", "given from the cache"),
    "cache_evictions": Figure("total", "files", "deleted from the cache for `cache_bytes`"),
    "cache_damaged": Figure("total", "files", "of the cache that were damaged, and read from the store again"),
}
"""The sums of all processes' transports, as ``store/NAME``."""

FIGURES: dict[str, Figure] = {
    **{key: _OF_LOADER[name] for key, name in KEY_NAMES.items()},
    **{f"store/{name}": figure for name, figure in STORE_FIGURES.items()},
}
"""Every key of `stats()` but those of stages and of a service's nodes, in its order."""

NODE_FIGURES: dict[str, Figure] = {
    "workers": Figure("now", "workers", "that are connected to this node, or were last"),
    "batches": Figure("total", "batches", "that came from it, also those that were not handed to the consumer"),
    "bytes": Figure("total", "bytes", "of those batches"),
    "busy_s": Figure("total", "s", "that its processes spent on them"),
}
"""What `stats()` has of each node of a service, as ``node/ADDRESS/NAME``."""

STAGE_HELP: dict[str, str] = {
    "sampler": "the sampler gives a batch's indices",
    "snapshot": "`state_dict` of a sampler, or of the dataset, is called and its result kept",
    "queue": "a task lies in its worker's queue, behind the tasks before it",
    "fetch": "the dataset is read; where many samples are read at a time, decoding included",
    "decode": "`decode` is called, summed over the batch's samples",
    "collate": "the collate function is called",
    "write": "the batch is written to shared memory; torch's default collation stacks the samples only here",
    "transfer": "the worker's answer is on its way, until the main process takes note of it",
    "order": "the batch is held back because an earlier one is not ready",
    "pin": "the batch is copied to page-locked memory",
    "h2d": "the batch is copied to the device, behind the copies before it",
    "wait": "the consumer waits",
    "consumer": "the consumer works, from a batch to its request for the next one",
    "start_process": "a worker's process is created",
    "start_import": "it starts Python and imports, where it is not forked, and takes over its setup",
    "start_dataset": "it unpickles the dataset, and calls `worker_init_fn` and the dataset's `__iter__`",
    "first_read": "its first fetch, which opens files and connections",
}
"""What happens in each stage while its time is taken."""
