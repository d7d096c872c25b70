"""Describes a loader: in a line for `repr`, in a table for notebooks, and in ``explain()`` with what bounds the run.

Data path: beside the consumer.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, Dataset
from torch.utils.data._utils import collate as torch_collate

from asyncloader.delivery.loader_device import current_transfer
from asyncloader.epoch.plan import start_method
from asyncloader.options.declaration import LoaderSpec, given_options, is_iterable
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.options.unknown_dataset import without_asking
from asyncloader.samplers.distributed import plain_sampler
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.source import THREADS

# The loaders' modules import this one for `repr`. So the functions import late what `repr` and an epoch do not need.
if TYPE_CHECKING:
    from asyncloader.live.snapshot import Reading
    from asyncloader.telemetry.diagnosis import Diagnosis


def as_text(name: str, spec: LoaderSpec[Any], place: str) -> str:
    """One line: `name` of the class, the options that matter most, and the loader's `place` in its epochs.

    Nothing of the user's is called: neither the dataset's `repr` nor its length.
    """
    parts = _parts(spec)
    options = ", ".join(f"{key}={value}" for key, value in parts.items() if key != "dataset")
    return f"<{name} of {parts['dataset']}: {options}; {place}>"


def as_html(name: str, spec: LoaderSpec[Any], place: str, run: Reading | None = None) -> str:
    """The same as a table, with the figures and the verdict of its run so far."""
    import html

    cells = {**_parts(spec), "position": place}

    if run is not None:
        from asyncloader.live.snapshot import Snapshots, summary

        cells = {**cells, **summary(Snapshots().take(run))}
    rows = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in cells.items())
    return f"<table><caption>{html.escape(name)}</caption>{rows}</table>"


def _parts(spec: LoaderSpec[Any]) -> dict[str, str]:
    known, spec = spec, without_asking(spec)
    parts = {"dataset": type(spec.dataset).__name__, "batch_size": str(spec.batch_size)}
    if type(spec.batch_sampler) not in (BatchSampler, type(None)):
        parts["batch_sampler"] = type(spec.batch_sampler).__name__
    elif known is spec and not is_iterable(spec):
        parts["sampler"] = type(plain_sampler(spec)).__name__
    seed = spec._asyncloader_options.seed
    return {**parts, "num_workers": str(spec.num_workers), "seed": str(seed)}


def explain(name: str, spec: LoaderSpec[Any], statistics: Statistics, pool: WorkerPool | None) -> str:
    """Several lines of text for the user."""
    config = EpochConfig.of(spec)
    lines = [f"{name}: {_workers(config)}", *_concurrency(config, statistics)]
    if config.num_workers:
        lines += [f"memory: {_rings(config, pool)}", *_copied(config)]
        lines += [f"collation: {_collation(config)}", f"faults: {_faults(config)}"]
    lines.append(f"order: {_order(config)}")
    if spec.pin_memory:
        lines.append(f"pinning: {_pinning()}")
    if config.device is not None:
        lines.append(f"device: {_device(spec, config, statistics)}")
    if given := given_options(spec):
        lines.append(f"options: {', '.join(given)}")
    if statistics.ring_copies:
        lines.append(
            f"copies: {statistics.ring_copies} of {statistics.batches} batches were copied out of their ring, because "
            "the consumer held more batches than the ring can spare"
        )
    # A copy, in one step: the loop's thread may add to them.
    lines += [] if config.auto is None else [f"num_workers: {words}" for words in list(config.auto.decisions)]
    lines += _waiting(statistics)
    lines.append(diagnose_run(spec, statistics).text)
    return "\n".join(lines)


def _waiting(statistics: Statistics) -> list[str]:
    from asyncloader.transports.network_client import silent_servers

    since = statistics.waiting_since
    lines = [] if since is None else [f"waiting: for a batch, for {perf_counter() - since:.1f} s so far"]
    return lines + [f"waiting: {store} does not answer" for store in sorted({*statistics.silent, *silent_servers()})]


def _workers(config: EpochConfig) -> str:
    kind = "async" if is_async_dataset(config.dataset) else "blocking"
    streams = "" if config.loader_streams is None else f" of {config.loader_streams} streams"
    if not config.num_workers:
        return f"no workers, {kind} dataset{streams} read in this process"
    keep = "persistent" if config.persistent_workers else "for one epoch"
    method = start_method(config)
    where = "in threads" if method == THREADS else f"by {method}"
    if method == "service":
        where = f"at {config.dataset.service.url}"
    return f"{config.num_workers} workers {where}, {keep}, {config.credits} batches ahead each, {kind} dataset{streams}"


def _concurrency(config: EpochConfig, statistics: Statistics) -> list[str]:
    lines = []
    if config.concurrent and not config.iterable:
        depth = statistics.prefetch_depth
        room = "" if depth in (0, config.credits) else f" ({depth} now, as large as they are)"
        how = f"by {config.fetch_threads} threads" if config.fetch_threads else f"{config.concurrency} at a time"
        lines.append(f"samples: fetched {how}, over {config.credits} batches in hand{room}")
    if config.decode is not None:
        threads = config.decode_threads if config.concurrent else 0
        lines.append(f"decoding: {_named(config.decode)}, " + (f"in {threads} threads" if threads else "inline"))
    return lines


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _rings(config: EpochConfig, pool: WorkerPool | None) -> str:
    if start_method(config) == THREADS:
        return "none: batches are made in this process's memory"
    most = config.ring_bytes
    bound = "following the batches seen" if most is None else f"bounded by ring_bytes={most:,}"
    sizes = "" if pool is None else f" of {', '.join(f'{keeper.nbytes:,}' for keeper in pool.rings)} bytes"
    return f"one anonymous ring a worker{sizes}, {bound}"


_LARGE = 100_000
"""Objects in a Python structure from which its copies in the workers are worth mentioning."""


def _copied(config: EpochConfig) -> list[str]:
    """What of the dataset each worker process comes to have a copy of, because it is made of Python objects."""
    method = start_method(config)
    if method in (THREADS, "service"):
        return []
    how = "comes to copy, as it counts references in them" if method == "fork" else "has a copy of"
    return [
        f"sharing: {name} has {number:,} Python objects, which each worker {how}; asyncloader.share keeps one for all"
        for name, number in _large_structures(config.dataset, "dataset")
    ]


def _large_structures(dataset: Any, name: str) -> Iterator[tuple[str, int]]:
    """Names and lengths of large lists, tuples, dicts and sets in a dataset's attributes, and in those of the datasets
    that it is a view of.
    """
    for key, value in list(getattr(dataset, "__dict__", {}).items()):
        if type(value) in (list, tuple, dict, set) and len(value) >= _LARGE:
            yield f"{name}.{key}", len(value)
        elif isinstance(value, Dataset) and name.count(".") < 5:  # they may refer to one another
            yield from _large_structures(value, f"{name}.{key}")


def _collation(config: EpochConfig) -> str:
    if config.collate_fn is not torch_collate.default_collate:
        return f"{_named(config.collate_fn)} makes the batch in private memory, which is then copied to the ring"
    place = "memory that is reused" if start_method(config) == THREADS else "the ring"
    return f"default, straight into {place} (one copy)"


def _faults(config: EpochConfig) -> str:
    most, hangs = config.max_restarts, config.worker_timeout
    text = (
        f"a worker that dies is replaced, {most} times an epoch at most" if most else "a worker's death ends the epoch"
    )
    text += "" if hangs is None else f", one that is at a task for {hangs:g} s is killed"
    found = {"raise": "fails its batch", "skip": "is left out", "refill": "is replaced by another one"}
    what = found[config.on_error] if isinstance(config.on_error, str) else "is replaced by on_error"
    return f"{text}; a sample that raises {what}"


def _order(config: EpochConfig) -> str:
    rank, world_size = config.topology
    text = "the sampler's" if config.seed is None else f"seeded by {config.seed}"
    if config.seed is not None and world_size > 1:
        text += f", rank {rank} of {world_size} (on_uneven={config.on_uneven!r})"
    if config.num_workers:
        text += ", in task order" if config.in_order else ", as batches complete"
    if config.num_workers and config.reorder_window:
        text += f", up to {config.reorder_window} batches ahead of a slow one"
    return text


def _pinning() -> str:
    import torch

    if not torch.accelerator.is_available():
        return "asked for, but there is no accelerator: plain memory"
    return "page-locked copies, made in a thread ahead of the consumer"


def _device(spec: LoaderSpec[Any], config: EpochConfig, statistics: Statistics) -> str:
    import torch

    device = torch.device(config.device)  # type: ignore[arg-type]
    ahead = f"{config.device_prefetch} ahead" if config.num_workers else "when asked for"
    if device.type == "cpu":
        return f"cpu, where batches are made; prepared {ahead}"
    if not config.num_workers or device.type != "cuda":
        return f"{device}, copied {ahead}"
    transfer = current_transfer(spec)
    if transfer is not None and transfer.accelerator.lock is None:
        return f"{device}, {ahead}, by way of page-locked copies: {transfer.accelerator.unlocked_because}"
    locked, staged = statistics.page_locked_bytes, statistics.staged_batches
    if not locked and staged > 1:
        return f"{device}, {ahead}, by way of page-locked copies: batches do not fit into rings of this ring_bytes"
    if not locked:
        return f"{device}, {ahead}, copied from rings that are page-locked when the first batch comes"
    more = f"; {staged} batches were copied to page-locked memory first" if staged else ""
    return (
        f"{device}, {ahead}, copied from rings of {locked:,} bytes, page-locked in {statistics.page_lock_s:.2f} s{more}"
    )


def diagnose_run(spec: LoaderSpec[Any], statistics: Statistics) -> Diagnosis:
    """Judge what bounds a loader's run so far."""
    from asyncloader.epoch.run_reading import run_of
    from asyncloader.telemetry.diagnosis import diagnose

    return diagnose(run_of(EpochConfig.of(spec), statistics))
