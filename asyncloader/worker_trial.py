"""Chooses the number of workers of a loader in torch mode, by a trial before its first epoch.

Data path: none; `DataLoader.__iter__` waits for it once.

In torch mode the worker that makes a batch is part of its random numbers, so the number must not change while the
loader is read. The trial reads samples of the dataset with a loader of its own in seeded mode, whose number may change,
until that has settled. It draws from no generator of this process, and reads neither the user's sampler nor generator.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Generator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, default_collate, default_convert

from asyncloader.options.auto import AutoWorkers, choice_of
from asyncloader.options.checks import warn_only_of
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.objects import Tuning
from asyncloader.telemetry.tuner import WorkerTuner

_log = logging.getLogger("asyncloader")

_SECONDS, _READING_S = 3.0, 2.6
"""For the whole trial, with the start and the end of its workers; and until the batch that is its last."""
_SEED = 0  # of the trial's order


def choose_workers(spec: LoaderSpec[Any]) -> None:
    """Choose the number of workers, if it is the loader's to choose by a trial and was not chosen yet. Blocks.

    An error of the dataset ends the trial, with the number at its beginning: the epoch raises it at its place.
    """
    auto = choice_of(spec)
    if auto is None or auto.chosen or spec._asyncloader_options.seed is not None:
        return
    auto.chosen = True  # first: a trial that fails is not repeated
    began = perf_counter()
    with _generators_kept():
        try:
            if not len(spec.dataset):  # type: ignore[arg-type]
                # An empty epoch measures nothing; the first epoch with samples has the trial.
                auto.chosen = False
                return
            _log.info(
                'num_workers="auto" tries numbers of workers on random samples, %g s at most, before the first epoch; '
                "with seed= it tries them while the epoch runs",
                _SECONDS,
            )
            trial = _try(spec, began + _READING_S)
        except Exception as error:
            auto.decisions.append(f"keeps {auto.number}: the trial failed with {type(error).__name__}: {error}")
            _log.warning('num_workers="auto" %s', auto.decisions[-1])
            return
    auto.decisions.extend(trial.decisions)
    # Without the factor that was measured: the trial's consumer takes no time, the epoch's may.
    auto.tuner = WorkerTuner(trial.number)
    vars(spec)["num_workers"] = trial.number
    auto.decisions.append(f"has {auto.number}, after a trial of {perf_counter() - began:.1f} s")
    _log.info('num_workers="auto" %s', auto.decisions[-1])


def _try(spec: LoaderSpec[Any], until: float) -> AutoWorkers:
    """Read the dataset until the number has settled, or this time. Returns the trial's choice."""
    from asyncloader.loader import DataLoader

    ours, collate = spec._asyncloader_options, spec.collate_fn
    batched = spec.batch_size is not None or spec.batch_sampler is not None
    size = spec.batch_size or getattr(spec.batch_sampler, "batch_size", None)
    with warn_only_of(()):
        loader = DataLoader[Any](
            spec.dataset,
            batch_size=size,
            # As many samples as the longest trial may read.
            sampler=_Endless(spec.dataset),
            num_workers="auto",
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
    auto = choice_of(loader)
    assert auto is not None
    auto.tuner = tuner = WorkerTuner(auto.number, quick=True)
    with loader:
        for _ in loader:
            if perf_counter() >= until or (tuner.settled and not tuner.tries):
                break
    if (last := tuner.finish()) is not None:
        auto.decisions.append(f"goes to {last.value} workers: {last.reason}")
    return auto


class _Endless(RandomSampler):
    """Random samples of the dataset, more than a trial reads; from a generator of its own."""

    def __init__(self, dataset: Any) -> None:
        generator = torch.Generator()
        generator.manual_seed(_SEED)
        super().__init__(dataset, replacement=True, num_samples=1 << 40, generator=generator)


@contextlib.contextmanager
def _generators_kept() -> Generator[None]:
    """Set this process's global generators back afterwards: code of the user's that runs here may draw from them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
