"""Reads the figures of a run from a loader's options and counters.

Data path: statistics -> [run_reading] -> diagnosis.
"""

from __future__ import annotations

import logging
import weakref

from asyncloader.base.cpus import cpu_limit, usable_cpus
from asyncloader.epoch.plan import start_method
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.telemetry.counters import total
from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.source import THREADS

_log = logging.getLogger("asyncloader")
_untold = [True]  # empty once a verdict was said unasked in this process


def tell_verdict(known: weakref.ref[EpochConfig], statistics: Statistics) -> None:
    """Say the verdict on a run that waits for data, in a warning; once in a process. `known`: weak, as the loader's
    statistics keep it.
    """
    config = known()
    if config is None or not _untold:
        return
    from asyncloader.telemetry.diagnosis import diagnose  # late: most runs never need it

    found = diagnose(run_of(config, statistics))
    if found.bound not in ("unknown", "consumer"):
        _untold.clear()
        _log.warning(
            "training has waited for data for %.0f of its first %.0f s, in a loader of %s. %s",
            *(statistics.wait_s, statistics.elapsed_s, type(config.dataset).__name__, found.text),
        )


def run_of(config: EpochConfig, statistics: Statistics) -> Run:
    """Return the figures of a loader's run so far."""
    blocks, in_threads = statistics.blocks(), start_method(config) == THREADS
    # The process's CPU time has that of its worker threads.
    of_workers = sum(total(block, "cpu_s") for worker, block in blocks.items() if worker >= 0) if in_threads else 0.0
    return Run(
        batches=statistics.batches,
        epochs=statistics.epochs,
        elapsed_s=statistics.elapsed_s,
        wait_s=statistics.wait_s,
        startup_s=statistics.startup_s,
        main_cpu_s=max(0.0, statistics.main_cpu_s - of_workers),
        ring_copies=statistics.ring_copies,
        oversize=statistics.oversize_batches,
        ring_needed=statistics.ring_needed,
        retirements=statistics.worker_retirements,
        blocks=blocks,
        cpus=usable_cpus(),
        cpu_limit=cpu_limit(),
        others_cpu=statistics.others_cpu(),
        workers=config.num_workers,
        persistent=config.persistent_workers,
        forks=start_method(config) == "fork",
        in_threads=in_threads,
        prefetch_factor=config.prefetch_factor if config.num_workers else None,
        iterable=config.iterable,
        one_by_one=config.iterable or config.planned,
        streams=config.loader_streams,
        asynchronous=config.concurrent and not config.fetch_threads,
        threads=config.fetch_threads,
        decode_threads=config.decode_threads if config.concurrent and config.decode is not None else 0,
        concurrency=config.concurrency,
        automatic=frozenset() if config.auto is None else frozenset({"num_workers"}),
        slow=statistics.slow_samples(),
        in_order=config.in_order,
        memory_limit=config.worker_memory_limit,
        snapshot_every=config.snapshot_every or 1,
        keeps_states=not config.iterable and config.stateful,
    )
