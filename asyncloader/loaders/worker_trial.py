"""Chooses the number of workers of a loader by a trial before its first epoch: for ``num_workers="auto"``.

Data path: none; `DataLoader.__iter__` waits for it once.

The trial reads samples of the dataset with loaders of its own, each with twice the workers of its predecessor, as long
as samples come clearly faster. It draws from no generator of this process, and reads neither the user's sampler nor
generator.
"""

from __future__ import annotations

import logging
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, default_collate, default_convert

from asyncloader.base.cpus import usable_cpus
from asyncloader.options.auto import AutoWorkers
from asyncloader.options.checks import warn_only_of
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.objects import Tuning
from asyncloader.telemetry.run_figures import MOST_WAITING_WORKERS
from asyncloader.workers.fetch.seeding import global_generators_kept
from asyncloader.workers.ipc.segment import memory_limit
from asyncloader.workers.memory_limit import private_bytes

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from asyncloader.loaders.loader import DataLoader

_log = logging.getLogger("asyncloader")

_SECONDS, _READING_S = 3.0, 2.6
"""For the whole trial, with the start and the end of its workers; and until the batch that is its last."""
_WINDOW_S, _BATCHES = 0.3, 8  # the least that a number is measured by
_WORTH = 1.2  # times as fast as with half the number: less may be noise
_FILES = 7  # descriptors of this process that a worker takes
_SEED = 0  # of the trial's order


def choose_workers(spec: LoaderSpec[Any]) -> None:
    """Choose the number of workers, if it is the loader's to choose and was not chosen yet. Blocks.

    An error of the dataset ends the trial, with the number at its beginning: the epoch raises it at its place.
    """
    auto = spec._asyncloader_choice
    # An empty epoch measures nothing; the first epoch with samples has the trial.
    if auto is None or auto.chosen or not len(spec.dataset):  # type: ignore[arg-type]
        return
    auto.chosen = True  # first: a trial that fails is not repeated
    began = perf_counter()
    _log.info(
        'num_workers="auto" tries numbers of workers on random samples, %g s at most, before the first epoch', _SECONDS
    )
    with global_generators_kept():
        try:
            _try(spec, auto, began + _READING_S)
        except Exception as error:
            auto.decisions.append(f"keeps {auto.number}: the trial failed with {type(error).__name__}: {error}")
            _log.warning('num_workers="auto" %s', auto.decisions[-1])
            return
    vars(spec)["num_workers"] = auto.number
    auto.decisions.append(f"has {auto.number}, after a trial of {perf_counter() - began:.1f} s")
    _log.info('num_workers="auto" %s', auto.decisions[-1])


def _try(spec: LoaderSpec[Any], auto: AutoWorkers, until: float) -> None:
    """Double the number as long as that is worth it, until this time."""
    rate, most, limit = _rate(spec, auto.number, until)
    while rate and auto.number < most and perf_counter() < until:
        tried = min(2 * auto.number, most)
        found, most, limit = _rate(spec, tried, until)
        if found < _WORTH * rate:
            auto.decisions.append(f"tried {tried}: {found:,.0f} samples/s instead of {rate:,.0f}")
            return
        auto.decisions.append(f"goes to {tried}: {found:,.0f} samples/s instead of {rate:,.0f}")
        auto.number, rate = tried, found
    auto.decisions.append(f"{limit} allow {most}" if auto.number >= most else "the trial's time was over")


def _rate(spec: LoaderSpec[Any], workers: int, until: float) -> tuple[float, int, str]:
    """Samples per second with this number of workers, 0 where the time is over; and the most workers that there may be,
    with the reason.
    """
    loader, began, first, count = _loader(spec, workers), 0.0, 0, 0
    size = loader.batch_size or 1
    with loader:
        batches: Any = iter(loader)
        for count, _ in enumerate(batches, 1):
            now = perf_counter()
            if began and now - began >= _WINDOW_S and count - first >= max(_BATCHES, 2 * workers):
                return (count - first) * size / (now - began), *_room(batches)
            if not began and count >= 2 * workers:  # the batches that were made while the workers started
                began, first = now, count
            if now >= until:
                break
    return 0.0, workers, "the trial's time was over: CPUs"


def _room(batches: Any) -> tuple[int, str]:
    """The most workers that there may be, and the reason: CPUs, open files or memory."""
    workers = batches._workers
    cpus = usable_cpus()
    # Samples that are awaited, or read by threads, need no more workers than CPUs: `concurrency` overlaps them.
    most = cpus if batches._config.concurrent else max(cpus, MOST_WAITING_WORKERS)
    limit = f"the {cpus} CPUs" if most == cpus else "reads that wait"
    files = _most_files()
    if files < _FILES * most:
        most, limit = files // _FILES, f"half of the open files of a process (ulimit -n): {files}"
    # Only by a half of the memory that is free without them, as files that they read, and the consumer, need some, too.
    largest = max(1 << 20, *(private_bytes(worker.pid) for worker in workers[:4]))
    if (free := memory_limit()[0]) is not None:
        fit = (free + len(workers) * largest) // 2 // largest
        if fit < most:
            most, limit = fit, f"half of {free >> 20:,} MiB of free memory, at {largest >> 20:,} MiB for each worker,"
    return max(most, len(workers)), limit


def _most_files() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2


def _loader(spec: LoaderSpec[Any], workers: int) -> DataLoader[Any]:
    """A loader of the trial: of random samples, in batches like those of the user's."""
    from asyncloader.loaders.loader import DataLoader

    ours, collate = spec._asyncloader_options, spec.collate_fn
    batched = spec.batch_size is not None or spec.batch_sampler is not None
    with warn_only_of(()):
        loader = DataLoader[Any](
            spec.dataset,
            batch_size=spec.batch_size or getattr(spec.batch_sampler, "batch_size", None),
            # As many samples as the longest trial may read.
            sampler=_Endless(spec.dataset),
            num_workers=workers,
            collate_fn=None if collate is (default_collate if batched else default_convert) else collate,
            timeout=spec.timeout,
            worker_init_fn=spec.worker_init_fn,
            multiprocessing_context=spec.multiprocessing_context,
            prefetch_factor=spec.prefetch_factor,
            seed=_SEED,
            rank=0,
            world_size=1,
            concurrency=ours.concurrency,
            decode=ours.decode,
            on_error=ours.on_error if ours.on_error != "refill" else "skip",
            tuning=Tuning(ring_bytes=ours.ring_bytes, decode_threads=ours.decode_threads),
        )
    loader._asyncloader_state.statistics.untold = False  # a trial's verdict is not about the user's run
    return loader


class _Endless(RandomSampler):
    """Random samples of the dataset, more than a trial reads; from a generator of its own."""

    def __init__(self, dataset: Any) -> None:
        generator = torch.Generator()
        generator.manual_seed(_SEED)
        super().__init__(dataset, replacement=True, num_samples=1 << 40, generator=generator)
