"""Reads a loader as fast as it delivers, and returns its rate, its stages' times and the verdict on the run.

Data path: job -> [measuring: target -> loader] -> the process that compares. Each job runs in a process of its own.

The consumer takes batches and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any

import torch

from asyncloader.benchmarking.arrival_times import ArrivalTimes
from asyncloader.epoch.run_reading import run_of
from asyncloader.loader import DataLoader
from asyncloader.options.auto import AutoValue, number_of
from asyncloader.options.clone import constructor_arguments, made_from
from asyncloader.options.declaration import OUR_OPTION_NAMES, LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.plain_context import plain_context
from asyncloader.samplers.position_source import PositionSource
from asyncloader.telemetry.counters import STAGES, stage_times
from asyncloader.telemetry.diagnosis import diagnose
from asyncloader.verification.target import facts, make_loader
from asyncloader.verification.user_code import UserFailure
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset


def look(make: Callable[[], Any]) -> dict[str, Any]:
    """Describe the user's loader in plain values."""
    loader = make_loader(make, 0)
    options = loader._asyncloader_options if isinstance(loader, LoaderSpec) else None
    auto = isinstance(vars(loader)["num_workers"], AutoValue)
    found = facts(loader)
    by_sync = isinstance(loader, LoaderSpec) and not isinstance(loader, DataLoader)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return {
        **found._asdict(),
        "name": f"{found.name} (read by a sync loader)" if by_sync else found.name,
        "auto": auto,
        "prefetch": number_of(loader.prefetch_factor),
        "persistent": loader.persistent_workers,
        "concurrency": None if options is None else number_of(options.concurrency),
        "context": loader.multiprocessing_context is not None,
        "assigned": assigns_shards(loader.dataset),
        "batch_size": size if isinstance(size, int) else None,
        "batches": _length(loader),
        "not_torch": _explain_not_torch(loader),
    }


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:
        return None


def _explain_not_torch(loader: torch.utils.data.DataLoader[Any]) -> str:
    """Say why torch's DataLoader cannot replace the loader. Returns an empty string if it can."""
    if not isinstance(loader, LoaderSpec):
        return ""
    options = loader._asyncloader_options
    if is_async_dataset(loader.dataset):
        return "the dataset's methods are async"
    if assigns_shards(loader.dataset) or isinstance(loader._index_sampler, PositionSource):
        return "asyncloader assigns the dataset's shards to the workers"
    if EpochConfig.of(loader).source is not None:
        return "the sampler is async"
    asked = {
        "decode=": options.decode is not None,
        "on_error=": options.on_error != "raise",
        "balance=": options.balance is not None,
        "device=": options.device is not None,
    }
    return ", ".join(f"it has no {name}" for name, set_ in asked.items() if set_)


# ---------------------------------------------------------------------------------------------------- the loaders


def _make_loader(make: Callable[[], Any], job: dict[str, Any]) -> torch.utils.data.DataLoader[Any]:
    """Make the loader of a job: the user's, asyncloader's or torch's, with the user's options and the job's changes."""
    loader, changes = make_loader(make, 0), job["changes"]
    if job["loader"] == "torch":
        given = constructor_arguments(loader, changes)
        return torch.utils.data.DataLoader(**{n: v for n, v in given.items() if n not in OUR_OPTION_NAMES})
    if isinstance(loader, DataLoader):
        return loader.clone(**changes) if changes else loader
    if job["loader"] == "given" and not changes and not isinstance(loader, LoaderSpec):
        return loader
    # An async loader, too, is read by a sync loader with its options.
    return made_from(loader, DataLoader, changes)


@plain_context
def _close_after(loader: Any) -> Generator[None]:
    """Close asyncloader's loader when the block ends."""
    if isinstance(loader, DataLoader):
        with closing(loader):
            yield
    else:
        yield  # torch's workers end with their iterator


# ------------------------------------------------------------------------------------------------------ measuring


def measure(make: Callable[[], Any], job: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any] | UserFailure:
    """Carry out a job, and return its result in plain values.

    Args:
        make: the user's function.
        job: values by name. ``loader`` is "given", "asyncloader" or "torch"; ``changes`` has the arguments that replace
            the user's; ``window`` is the number of seconds to measure.
        note: function that receives the progress of the run in words.
    """
    note("the loader was being made")
    loader = _make_loader(make, job)
    try:
        with _close_after(loader):
            note("the first batch was being made")
            times = ArrivalTimes(perf_counter(), job["window"], *_count_ready(loader))
            for number in _read(loader, times):
                if number < 100 or not number % 100:  # a batch may take microseconds
                    note(f"batch {number} was being made")
            rate = times.result()
            result: dict[str, Any] = {"workers": number_of(loader.num_workers), "rate": 0.0}
            if rate is not None:
                result |= rate._asdict()
                if isinstance(loader, DataLoader) and rate.rate:
                    result |= _explain_rate(loader)
    except Exception as error:
        return UserFailure.of(error)
    return result


def _explain_rate(loader: DataLoader[Any]) -> dict[str, Any]:
    """Explain the rate of a run by the loader's own figures: the bound, the stages, better settings."""
    statistics = loader._asyncloader_state.statistics
    run = run_of(EpochConfig.of(loader), statistics)
    found = diagnose(run)
    stages = {stage: stage_times(run.merged, stage) for stage in STAGES}
    return {
        "bound": found.bound,
        "verdict": found.text,
        "stages": {stage: list(times) for stage, times in stages.items() if times.number},
        "candidates": [dict(each) for each in found.candidates],
        "computing": run.computing_share,
        "bytes": statistics.bytes / max(1, statistics.batches),
    }


def _count_ready(loader: torch.utils.data.DataLoader[Any]) -> tuple[int, int]:
    """Return the number of batches that may be ready when the first is taken, and the number of workers."""
    workers = number_of(loader.num_workers)
    if not isinstance(loader, LoaderSpec):
        return workers * (number_of(loader.prefetch_factor) or 0), workers
    return max(1, workers) * EpochConfig.of(loader).credits, workers


def _read(loader: torch.utils.data.DataLoader[Any], times: ArrivalTimes) -> Iterator[int]:
    """Read batches until the run has enough. Yields the number of batches so far."""
    number = 0
    while True:
        for _ in loader:
            number += 1
            yield number
            if times.came(perf_counter()):
                return
        if times.ended(perf_counter()):
            return
