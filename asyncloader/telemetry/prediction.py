"""Predicts how long a run would have taken with other options. Pure.

Data path: run_figures -> [prediction] -> diagnosis.

The prediction is deliberately simple. A batch takes as long as the slowest of these: the consumer; the workers'
time for a batch, divided among them; the CPU time that it costs in all, divided among the CPUs. Starting workers comes
in addition, once or for each epoch. Computing takes longer if there is more to run than there are CPUs: the more
workers there are, and the more other programs use the CPUs, which is known from how long our processes waited for one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.tuner import MOST_WAITING_WORKERS

BATCH_COST_S = 300e-6
"""Cost of a worker's batch in both processes, besides its samples."""

WORTH = 1.1
"""The least gain for which a change is proposed."""

CROWDED = 1.1  # how much longer computing takes if more workers than CPUs take turns
_FORK_S, _SPAWN_S = 0.05, 2.0  # to start workers, where that was not measured
_CONCURRENCIES = (16, 64, 256)
_WORKERS = (0, 1, 2, 4, 8, 16, 32, MOST_WAITING_WORKERS)


@dataclass(frozen=True)
class Costs:
    """The costs of a batch, in seconds; see the module's docstring."""

    consumer: float
    taking: float
    """To take a batch from a worker, in the consumer's process."""
    work: float
    """A worker's time for a batch, if it never waits for a CPU."""
    computing: float
    """The part of that in which it computes."""
    cpu: float
    """Of all processes."""
    latency: float
    """Of the samples of a batch that are awaited together; 0 for blocking datasets."""
    startup: float
    """Once for each start of workers."""


class _Setting(NamedTuple):
    workers: int
    persistent: bool
    concurrency: int


def costs_of(run: Run) -> Costs:
    """Return the costs of a run's mean batch."""
    consumer = run.mean("consumer")
    work = run.mean("fetch", "collate", "write") + (0.0 if run.asynchronous or run.threads else run.mean("decode"))
    latency = run.mean("fetch") if run.asynchronous else 0.0
    if run.workers:
        made = max(1, run.stage("write").number)
        delayed = run.sum("delayed_s") / made
        cpu = run.sum("cpu_s") / made + run.main_cpu_s / run.batches
        work = max(run.sum("cpu_s") / made, work - delayed)
        starts = max(1, round(run.stage("start_process").number / run.workers))
        taking = min(1e-3, max(BATCH_COST_S / 3, run.main_cpu_s / run.batches - consumer))
        computing = min(work, run.sum("cpu_s") / made)
        return Costs(consumer, taking, work, computing, cpu, latency, run.startup_s / starts)
    starting = _FORK_S if run.forks else _SPAWN_S
    work *= 1 - min(0.9, run.sum("delayed_s") / max(1e-9, run.sum("sampled_s")))
    cpu = run.main_cpu_s / run.batches
    return Costs(consumer, BATCH_COST_S / 3, work, work * run.computing_share, cpu, latency, starting)


def expected_s(run: Run) -> float:
    """Predict the seconds of a run with the options that it had."""
    return _predicted(run, costs_of(run), _Setting(run.workers, run.persistent, run.concurrency))


def ring_gain(run: Run) -> float:
    """What slots for all batches would gain: memory that is used again is written three times as fast."""
    costs, now = costs_of(run), _Setting(run.workers, run.persistent, run.concurrency)
    less = replace(costs, work=costs.work - run.mean("write") * 2 / 3, cpu=costs.cpu - run.mean("write") * 2 / 3)
    return _predicted(run, costs, now) / max(1e-9, _predicted(run, less, now))


def faster(run: Run, *, any_order: bool = False) -> tuple[dict[str, Any], float]:
    """Search the settings whose effect can be predicted.

    Returns:
        The options to change, and the factor that this gains; none and 1 if nothing gains enough. Unless `any_order`,
        the batches come in the same order.
    """
    costs, now = costs_of(run), _Setting(run.workers, run.persistent, run.concurrency)
    expected = max(run.elapsed_s, 1e-9)
    scale = expected / max(_predicted(run, costs, now), 1e-9)  # for costs that the prediction leaves out
    best, best_s = now, expected
    for setting in _settings(run, any_order=any_order):
        seconds = _predicted(run, costs, setting) * min(1.3, max(1.0, scale))
        # Settings that use less come first, so a later setting must be clearly better.
        if seconds < best_s * 0.95:
            best, best_s = setting, seconds
    gain = expected / best_s
    if gain < WORTH or best == now:
        return {}, 1.0
    return _changed(now, best), gain


def candidates(run: Run, *, any_order: bool = False) -> list[dict[str, Any]]:
    """Return the changes whose effect can be predicted, to be tried in this order: the fastest prediction comes first.
    Unless `any_order`, the batches come in the same order.
    """
    costs, now = costs_of(run), _Setting(run.workers, run.persistent, run.concurrency)
    settings = [setting for setting in _settings(run, any_order=any_order) if setting != now]
    settings.sort(key=lambda setting: _predicted(run, costs, setting))
    return [_changed(now, setting) for setting in settings]


def _changed(now: _Setting, to: _Setting) -> dict[str, Any]:
    change: dict[str, Any] = {}
    if to.workers != now.workers:
        change["num_workers"] = to.workers
    if to.persistent != now.persistent and to.workers:
        change["persistent_workers"] = to.persistent
    if to.concurrency != now.concurrency:
        change["concurrency"] = to.concurrency
    return change


def _settings(run: Run, *, any_order: bool) -> list[_Setting]:
    """Settings that give the same batches, in the same order unless `any_order`; those that use less come first."""
    workers = [run.workers]
    if any_order or not run.iterable or run.streams is not None:
        # The samples of a stream that are awaited come one after the other, too.
        waits = run.computing_share < 0.6 and (run.iterable or not (run.asynchronous or run.threads))
        most = max(run.cpus, MOST_WAITING_WORKERS) if waits else run.cpus
        most = most if run.streams is None else min(most, run.streams)  # a worker serves at least one of them
        least = 1 if run.held_up else 0  # this process would be no quicker at making batches
        workers = sorted({run.workers, *(number for number in (*_WORKERS, run.cpus) if least <= number <= most)})
    several = [run.concurrency]
    if run.asynchronous and not run.iterable and not run.tunes_concurrency:
        several += [number for number in _CONCURRENCIES if number > run.concurrency]
    settings = [_Setting(number, run.persistent, concurrency) for number in workers for concurrency in several]
    if run.epochs > 1:
        settings += [setting._replace(persistent=True) for setting in settings if setting.workers]
    return settings


def _predicted(run: Run, costs: Costs, setting: _Setting) -> float:
    """Seconds that the run would take with these settings."""
    number = setting.workers
    making, slower = _making(run, costs, number)
    if run.asynchronous and not run.iterable:
        in_flight = max(1.0, setting.concurrency / run.batch_size)
        computing = run.sum("cpu_s") / run.batches if run.workers else costs.cpu
        making = max(costs.latency / in_flight, computing * slower)
    if not number:
        making -= run.mean("write")
        overlaps = run.asynchronous and not run.iterable
        period = max(costs.consumer, making) if overlaps else costs.consumer + making
        return run.batches * period
    cpu = costs.cpu + (0.0 if run.workers else BATCH_COST_S)
    crowded = CROWDED if number > run.cpus else 1.0
    period = max(costs.consumer + costs.taking, (making + BATCH_COST_S) / number, cpu / run.allowed_cpus * crowded)
    starts = 1 if setting.persistent else run.epochs
    return run.batches * period + starts * costs.startup * (0.7 + 0.3 * number / max(1, run.workers))


def _making(run: Run, costs: Costs, workers: int) -> tuple[float, float]:
    """Seconds that each of this number of workers takes for a batch, and the factor by which computing takes longer
    because they share the CPUs.
    """
    waiting, slower, others = costs.work - costs.computing, 1.0, run.other_threads
    for _ in range(20):  # workers that compute for longer are more often in each other's way
        making = waiting + costs.computing * slower
        runnable = max(1, workers) * min(1.0, costs.computing * slower / max(1e-9, making))
        slower = (slower + max(1.0, (runnable + others) / run.allowed_cpus)) / 2
    return waiting + costs.computing * slower, slower
