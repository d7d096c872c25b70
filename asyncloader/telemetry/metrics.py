"""Describes a loader's statistics for monitoring systems: type, unit, help and labels of each figure.

`metrics` gives what an exporter needs, in Prometheus' model and its naming rules; nothing is served or imported here.
`FIGURES` is also the table of docs/reference/statistics.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from asyncloader.telemetry.counters import STAGES, stage_times


class Figure(NamedTuple):
    """A key of `stats()`: ``"total"`` only grows, ``"now"`` is a momentary value, ``"derived"`` is made of others."""

    kind: Literal["total", "now", "derived"]
    unit: str
    help: str


FIGURES: dict[str, Figure] = {
    "data/batches": Figure("total", "batches", "handed to the consumer since the loader was made"),
    "data/samples": Figure("total", "samples", "in those batches, as far as the batch size says"),
    "data/bytes": Figure("total", "bytes", "of tensors in those batches"),
    "data/wait_s": Figure(
        "total",
        "s",
        "that the consumer spent in `next` or `anext`, the current call included: waiting, taking a batch, and in the "
        "sampler",
    ),
    "data/wait_frac": Figure("derived", "0 to 1", "the share of waiting in the time spent iterating"),
    "data/batches_per_sec": Figure("derived", "1/s", "over the time spent iterating"),
    "data/samples_per_sec": Figure("derived", "1/s", "over the time spent iterating"),
    "data/bytes_per_sec": Figure("derived", "B/s", "over the time spent iterating"),
    "data/queue_depth": Figure("now", "batches", "ready and not yet taken"),
    "data/prefetch_depth": Figure(
        "now",
        "batches",
        "that each worker may have outstanding, as large as batches are; without workers: this process, with an async "
        "dataset or `concurrency`",
    ),
    "data/time_to_first_batch_s": Figure("now", "s", "from `iter()` to the first batch of the latest epoch"),
    "data/startup_s": Figure("total", "s", "to the first batch, of all epochs that had to start workers"),
    "data/worker_busy_frac": Figure("derived", "0 to 1", "the share of their time that the workers spent on samples"),
    "data/oversize_batches": Figure("total", "batches", "that bypass the ring, because they are larger than its slots"),
    "data/ring_copies": Figure("total", "batches", "copied out of a ring because the consumer held its slots"),
    "data/hedged_batches": Figure(
        "total", "batches", "that were late at one node of a service, and asked of another one too"
    ),
    "data/worker_restarts": Figure("total", "workers", "that died, or were too late, and were replaced"),
    "data/worker_retirements": Figure(
        "total", "workers", "replaced because they had grown beyond `worker_memory_limit`"
    ),
    "data/skipped_samples": Figure(
        "total", "samples", "that raised with `on_error` set, substitutes that raised too included"
    ),
    "data/refilled_samples": Figure("total", "samples", 'of those, replaced by another one (`on_error="refill"`)'),
    "device/page_locked_bytes": Figure(
        "now", "bytes", "of rings that were page-locked for the `device`, since the loader was made"
    ),
    "device/page_lock_s": Figure("total", "s", "that this took"),
    "device/staged_batches": Figure(
        "total", "batches", "of workers that were not copied to the `device` straight from a page-locked ring"
    ),
    "data/dropped_samples": Figure(
        "total",
        "samples",
        "left out at the ends of epochs, over all ranks, because these could not share them evenly; an estimate for "
        "shards whose samples are not counted",
    ),
    "data/repeated_samples": Figure("total", "samples", "given a second time there, over all ranks"),
    "store/requests": Figure("total", "requests", "sent to stores by workers and main process, retries included"),
    "store/bytes": Figure("total", "bytes", "received from stores"),
    "store/retries": Figure("total", "requests", "that were tried again: after 503s, resets, stalls"),
    "store/resumed": Figure("total", "downloads", "that went on where they had broken, by range"),
    "store/given_up": Figure("total", "requests", "that failed for good, although the failure was retryable"),
    "store/retry_wait_s": Figure("total", "s", "of back-off, summed over the requests"),
    "store/cache_hits": Figure("total", "reads", "given from `cache_dir`"),
    "store/cache_misses": Figure("total", "reads", "asked of the store although there was a cache"),
    "store/cache_bytes": Figure("total", "bytes", "given from the cache"),
    "store/cache_evictions": Figure("total", "files", "deleted from the cache for `cache_bytes`"),
    "store/cache_damaged": Figure("total", "files", "of the cache that were damaged, and read from the store again"),
}
"""Every key of `stats()` but those of stages and of a service's nodes, in its order."""

NODE_FIGURES: dict[str, Figure] = {
    "workers": Figure("now", "workers", "that are at this node, or were there last"),
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


class MetricSample(NamedTuple):
    """One value of a metric; `name` has the suffixes that Prometheus' text format wants."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """One metric with all of its values."""

    name: str
    type: Literal["counter", "gauge", "summary"]
    unit: str
    help: str
    samples: Sequence[MetricSample]


def metrics(stats: Mapping[str, float], blocks: Mapping[int, Sequence[float]]) -> list[Metric]:
    """Return all metrics of a loader.

    Args:
        stats: its `stats()`.
        blocks: what each process has timed, by the worker's number; -1: the main process.
    """
    found = []
    for key, figure in FIGURES.items():
        if figure.kind == "derived":
            continue
        found.append(_metric(key, figure, [({}, stats[key])]))
    addresses = [key[len("node/") : -len("/workers")] for key in stats if re.fullmatch("node/.*/workers", key)]
    for name, figure in NODE_FIGURES.items() if addresses else ():
        values = [({"node": address}, stats[f"node/{address}/{name}"]) for address in addresses]
        found.append(_metric(f"node/{name}", figure, values))
    return [*found, _stages(blocks)]


def _metric(key: str, figure: Figure, values: Sequence[tuple[dict[str, str], float]]) -> Metric:
    name = "asyncloader_" + key.replace("/", "_").removesuffix("_s") + ("_seconds" if figure.unit == "s" else "")
    kind: Literal["counter", "gauge"] = "gauge" if figure.kind == "now" else "counter"
    full = name if kind == "gauge" else f"{name}_total"
    samples = [MetricSample(full, labels, value) for labels, value in values]
    return Metric(name, kind, figure.unit, f"{figure.unit} {figure.help}", samples)


def _stages(blocks: Mapping[int, Sequence[float]]) -> Metric:
    name, samples = "asyncloader_stage_seconds", []
    for worker, block in blocks.items():
        for stage in STAGES:
            times = stage_times(block, stage)
            if not times.number:
                continue
            labels = {"stage": stage, "worker": "main" if worker < 0 else str(worker)}
            for quantile, value in (("0.5", times.p50), ("0.95", times.p95), ("0.99", times.p99)):
                samples.append(MetricSample(name, {**labels, "quantile": quantile}, value))
            samples.append(MetricSample(f"{name}_sum", labels, times.total))
            samples.append(MetricSample(f"{name}_count", labels, float(times.number)))
    return Metric(name, "summary", "s", "seconds that a batch spent in a stage of its way, in a process", samples)
