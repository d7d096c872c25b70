"""Names settings that are worth trying, for a run whose bound is known. Pure.

Data path: run_figures -> [candidates] -> diagnosis.

Each is an option that acts on what the consumer waited for, and alters neither order nor samples. Nothing is predicted:
only a trial shows what a setting gains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncloader.telemetry.run_figures import BATCH_COST_S, Run
from asyncloader.telemetry.tuner import CONCURRENCY, MOST_WAITING_WORKERS

_MOST = 3
_MOST_IN_FLIGHT = 1024
_MOST_THREADS = 64
_STARTING = 0.02  # the share of starts in the time from which they are worth saving
_SAVED = 0.02  # the share of saving states in the time that is left


def candidates(run: Run, bound: str) -> tuple[dict[str, Any], ...]:
    """Return the settings to try, at most three, the likeliest first.

    Args:
        run: its figures.
        bound: the verdict on it.
    """
    found: list[dict[str, Any]] = []
    for each in _settings(run, bound):
        if each not in found and not each.keys() & run.tried.keys():
            found.append(each)
    return tuple(found[:_MOST])


def _settings(run: Run, bound: str) -> Iterator[dict[str, Any]]:
    """Settings for this bound, the likeliest first; some of them twice, or of an option that is "auto"."""
    if bound in ("unknown", "consumer"):
        return
    same_order = not run.iterable or run.streams is not None
    cheap = run.workers > 0 and run.work_s < BATCH_COST_S
    if cheap and same_order:
        yield {"num_workers": 0}
    if bound == "startup":
        yield from _kept(run)
        # Not where samples wait: here each would be waited for alone.
        if run.workers and same_order and run.computes and run.work_s * run.batches < run.startup_s:
            yield {"num_workers": 0}
    elif bound == "ring" and run.ring_needed:
        yield {"ring_bytes": run.ring_needed}
    elif bound == "memory" and run.memory_limit is not None:
        yield {"worker_memory_limit": 4 * run.memory_limit}
    elif bound == "consumer process":
        if not run.in_threads and run.prefetch_factor is not None and run.prefetch_factor < 4:
            yield {"prefetch_factor": 4}
    elif bound == "snapshots" and not run.keeps_states:
        every = next(number for number in (10, 100, 1000) if run.saving / number <= _SAVED)
        yield {"snapshot_every_n_steps": every * run.snapshot_every}
    elif bound in ("fetch", "compute", "cpus"):
        waits = bound == "fetch"
        if waits and not run.gil_held:
            yield from _in_flight(run)
        if same_order and not cheap and (waits or not run.in_threads) and not run.gil_held:
            yield from _workers(run, waits=waits)
    yield from _kept(run)


def _kept(run: Run) -> Iterator[dict[str, Any]]:
    """Workers that are started once, where starts take a share worth saving."""
    if run.workers and not run.persistent and run.epochs > 1 and run.startup_s > _STARTING * run.elapsed_s:
        yield {"persistent_workers": True}


def _in_flight(run: Run) -> Iterator[dict[str, Any]]:
    """More samples at a time: of a dataset whose samples are awaited, or fetched or decoded by threads."""
    if run.decode_threads and run.mean("decode") > run.mean("fetch") / 2:
        yield {"decode_threads": min(_MOST_THREADS, 4 * run.decode_threads)}
        return
    if run.one_by_one or not (run.asynchronous or run.threads):
        return
    most = _MOST_IN_FLIGHT if run.asynchronous else _MOST_THREADS
    for times in (4, 16):
        if run.concurrency < most:
            yield {"concurrency": min(most, times * run.concurrency)}
    if run.asynchronous and run.concurrency >= CONCURRENCY:
        yield {"concurrency": run.concurrency // 4}  # requests may be in each other's way


def _workers(run: Run, *, waits: bool) -> Iterator[dict[str, Any]]:
    """More workers: up to the CPUs where samples compute or are awaited together, and more where each waits alone.
    Fewer where they compute and are more than the CPUs.
    """
    cpus = max(1, int(run.allowed_cpus))
    alone = waits and (run.one_by_one or not (run.asynchronous or run.threads))
    most = MOST_WAITING_WORKERS if alone else cpus
    most = most if run.streams is None else min(most, run.streams)  # a worker serves at least one of them
    if not waits and run.workers > run.cpus:
        yield {"num_workers": cpus}
    for number in (2 * run.workers, 4 * run.workers) if run.workers else (2, 8):
        if run.workers < min(number, most):
            yield {"num_workers": min(number, most)}
