"""Judges what bounds a run, and which options would make it faster. Pure.

Data path: statistics -> [diagnosis] -> explain.

`diagnose` first asks whether there is anything to gain: a consumer that hardly waits is the bound itself. Then it names
what the time went to, by the times of stages, and predicts how long the same run would have taken with other numbers of
workers, with persistent workers, with more samples in flight. A change is proposed only if it can act here, if it
alters neither order nor samples, and if the prediction is worth it; what else would help is in the text alone.

The prediction is deliberately simple. A batch takes as long as the slowest of these: the consumer; the workers'
time for a batch, divided among them; the CPU time that it costs in all, divided among the CPUs. Starting workers comes
in addition, once or for each epoch. Computing takes longer if there is more to run than there are CPUs: the more
workers there are, and the more other programs use the CPUs, which is known from how long our processes waited for one.

How long computing will take follows from that, so a gain is promised. How long waiting will take does not: reads of
several workers may wait for one lock, or for a store that answers no faster; and other programs come and go. There the
gain is an upper bound, and the text says so (`Diagnosis.sure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from asyncloader.counters import Stage, StageTimes, stage_times, total

__all__ = ["Bound", "Diagnosis", "Run", "diagnose"]

Bound = Literal[
    "unknown",
    "consumer",
    "startup",
    "snapshots",
    "sampler",
    "store",
    "memory",
    "ring",
    "consumer process",
    "order",
    "slow worker",
    "shards",
    "cpus",
    "overhead",
    "compute",
    "fetch",
]
"""What bounds a run: nothing that can be judged yet; the consumer; starting workers; saving states of the dataset or
the sampler; the sampler; a store that fails; the memory limit of workers; rings that are too small; a consumer's
process that does not get to take batches; batches that wait for an earlier one; one worker; shards that are fewer than
workers; all CPUs; what each batch costs whatever is in it; the dataset's computing; the dataset's waiting.
"""

_LEAST_BATCHES = 8
_LEAST_SECONDS = 0.05
_HEALTHY_WAIT = 0.05
_SAVING = 0.25  # the share of saving states in the time from which it is the bound
_STARTING = 0.35  # the share of starts in the waiting from which they are the bound
_STARTING_ONCE = 0.5  # of one epoch's start in the whole time
_CROWDED = 1.1  # how much longer computing takes if more workers than CPUs take turns
_OTHERS = 0.5  # threads of other programs, from which they are mentioned
_WORTH = 1.1  # the least gain for which a change is proposed
_BATCH_COST_S = 300e-6  # what a batch of a worker costs in both processes, besides its samples
_FORK_S, _SPAWN_S = 0.05, 2.0  # to start workers, where that was not measured
_MOST_WAITING_WORKERS = 16  # workers that are proposed for a blocking dataset that waits
_HELD_UP_S = 2e-3  # an answer's way to this process, from which its own code is in the way
_CONCURRENCIES = (16, 64, 256)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run: its statistics and the options that matter.

    Attributes:
        batches: delivered.
        epochs: begun.
        elapsed_s: seconds of iterating.
        wait_s: of those, waited by the consumer.
        startup_s: of those, before the first batch of epochs that started workers.
        main_cpu_s: CPU seconds of the consumer's process meanwhile.
        ring_copies: batches copied out of a ring.
        oversize: batches that did not fit into one.
        ring_needed: `ring_bytes` with which they would; 0: they do.
        retirements: workers that exceeded the memory limit.
        blocks: what each process timed, by the worker's number; -1: the main process.
        cpus: that may be used.
        cpu_limit: CPU seconds per second that are allowed, if it is less than `cpus`.
        workers: `num_workers`.
        persistent: `persistent_workers`.
        forks: whether workers are forked.
        prefetch_factor: None without workers.
        batch_size: samples in a batch, as far as known.
        iterable: whether the dataset is a stream: then the number of workers is part of its order.
        asynchronous: whether samples are awaited, `concurrency` of them at a time.
        threads: that fetch samples of a blocking dataset, in each worker; 0: it has none.
        concurrency: see there.
        in_order: whether batches are delivered in order.
        memory_limit: `worker_memory_limit`.
        snapshot_every: `snapshot_every_n_steps`.
        keeps_states: whether the dataset has a state that must be saved after each batch, if at all.
    """

    batches: int
    epochs: int
    elapsed_s: float
    wait_s: float
    startup_s: float
    main_cpu_s: float
    ring_copies: int = 0
    oversize: int = 0
    ring_needed: int = 0
    retirements: int = 0
    blocks: Mapping[int, Sequence[float]]
    cpus: int
    cpu_limit: float | None = None
    workers: int
    persistent: bool = False
    forks: bool = True
    prefetch_factor: int | None = None
    batch_size: int = 1
    iterable: bool = False
    asynchronous: bool = False
    threads: int = 0
    concurrency: int = 1
    in_order: bool = True
    memory_limit: int | None = None
    snapshot_every: int = 1
    keeps_states: bool = False
    merged: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "merged", [sum(each) for each in zip(*self.blocks.values(), strict=True)])

    def stage(self, stage: Stage) -> StageTimes:
        """The times of a stage in all processes."""
        return stage_times(self.merged, stage)

    def mean(self, *stages: Stage) -> float:
        """Seconds of these stages for a mean batch."""
        return sum(times.total / times.number for times in map(self.stage, stages) if times.number)

    def sum(self, key: str) -> float:
        """A sum of all processes."""
        return total(self.merged, key)

    @property
    def steady_s(self) -> float:
        """Seconds of iterating without starts."""
        return max(1e-9, self.elapsed_s - self.startup_s)


class Diagnosis(NamedTuple):
    """What bounds a run, and what would make it faster.

    Attributes:
        bound: what bounds it; see `Bound`.
        evidence: the figures that show it, in seconds per batch or as shares.
        change: options and their new values; ``loader.clone(**change)`` applies them. Empty where nothing is to be
            gained, the run was too short to judge, or what would help is not an option, or would alter the order.
        gain: the factor by which the run should become faster with the change; 1 without one.
        text: the same in one or two sentences.
        sure: whether the gain follows from what was measured. If not, it is the most that can be had: whether several
            workers wait no longer for their reads than one, or other programs leave CPUs to them, only a trial tells.
    """

    bound: Bound
    evidence: Mapping[str, float]
    change: Mapping[str, Any]
    gain: float
    text: str
    sure: bool = True


@dataclass(frozen=True)
class _Costs:
    """What a batch costs, in seconds; see the module's docstring."""

    consumer: float
    taking: float
    """To take a batch from a worker, in the consumer's process."""
    work: float
    """A worker's time for a batch, if it never waits for a CPU."""
    computing: float
    """Of that, what it computes."""
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


def diagnose(run: Run) -> Diagnosis:
    """Judge a run."""
    if not run.batches:
        return Diagnosis("unknown", {}, {}, 1.0, "Nothing was loaded yet.")
    if run.elapsed_s < _LEAST_SECONDS or run.batches < _LEAST_BATCHES:
        text = f"{run.batches} batches in {run.elapsed_s:.2f} s are too few to judge."
        return Diagnosis("unknown", {}, {}, 1.0, text)
    waited = min(1.0, run.wait_s / run.elapsed_s)
    if run.epochs == 1:  # its start will not come again
        waited = min(waited, max(0.0, run.wait_s - run.startup_s) / run.steady_s)
    if waited < _HEALTHY_WAIT:
        text = f"Consumer-bound: it waited for data {waited:.0%} of the time; the loader keeps up, nothing to change."
        return Diagnosis("consumer", {"wait_frac": waited}, {}, 1.0, text)
    head = f"Input-bound: the consumer waited {waited:.0%} of the time"
    bound, evidence, words = _bound(run)
    change, gain = _change(run, bound)
    evidence = {"wait_frac": waited, **evidence}
    doubt = _doubt(run, bound, change)
    text = f"{head}. {_advice(run, bound, words, change, gain, doubt)}"
    return Diagnosis(bound, evidence, change, gain, text, not doubt)


# ------------------------------------------------------------------------------------------------ what bounds it


def _bound(run: Run) -> tuple[Bound, dict[str, float], str]:
    """Return what the consumer waited for, the figures that show it, and a sentence."""
    steady_wait = max(1e-9, run.wait_s - run.startup_s)
    if found := _trouble(run, run.wait_s):
        return found
    if run.startup_s > (_STARTING * run.wait_s if run.epochs > 1 else _STARTING_ONCE * run.elapsed_s):
        each = run.startup_s / max(1, run.epochs if not run.persistent else 1)
        share = run.startup_s / run.elapsed_s
        words = f"Starting workers took {share:.0%} of the time, {each:.2g} s each time."
        return "startup", {"startup_frac": share, "startup_s": each}, words
    if (share := _saving(run)) > _SAVING:
        each = run.mean("snapshot")
        words = f"Saving states took {share:.0%} of the time, {each * 1e3:.3g} ms each (state_dict)."
        return "snapshots", {"snapshot_frac": share, "snapshot_s": each}, words
    sampler = run.stage("sampler").total
    if sampler > 0.5 * steady_wait and sampler > 0.1 * run.steady_s:
        words = f"The sampler took {sampler / run.batches * 1e3:.3g} ms for a batch: make it cheaper."
        return "sampler", {"sampler_s": sampler / run.batches}, words
    if found := _workers_trouble(run) if run.workers else None:
        return found
    return _dataset(run)


def _trouble(run: Run, waited_s: float) -> tuple[Bound, dict[str, float], str] | None:
    """What is wrong outside of the dataset's code."""
    backoff = run.sum("retry_wait_s") / max(1, run.workers)
    tries = run.sum("retries")
    if backoff > 0.05 * waited_s and tries > 0.1 * run.sum("requests"):
        words = (
            f"The store failed {tries:.0f} of {run.sum('requests'):.0f} requests, and {backoff:.3g} s went by in "
            "waiting to try them again: ask less of it at a time, or have it scaled up."
        )
        return "store", {"retries": tries, "retry_wait_s": backoff}, words
    if run.retirements * 10 > run.batches:
        words = (
            f"{run.retirements} workers were replaced in {run.batches} batches because their memory had grown beyond "
            f"worker_memory_limit={run.memory_limit}: raise it, or find what grows."
        )
        return "memory", {"retirements": float(run.retirements)}, words
    return None


def _workers_trouble(run: Run) -> tuple[Bound, dict[str, float], str] | None:
    """What keeps finished work from the consumer, or workers from working."""
    period = run.steady_s / run.batches
    if run.oversize * 2 > run.batches and _ring_gain(run) > _WORTH:
        words = (
            f"{run.oversize} of {run.batches} batches did not fit into the rings and were given memory of their own."
        )
        return "ring", {"oversize_frac": run.oversize / run.batches}, words
    if run.ring_copies * 2 > run.batches:
        words = (
            f"{run.ring_copies} of {run.batches} batches were copied out of the rings, because the consumer holds "
            "many: hold fewer batches at a time."
        )
        return "ring", {"copied_frac": run.ring_copies / run.batches}, words
    costs = _costs(run)
    if costs.work < _BATCH_COST_S:
        words = f"A batch takes {costs.work * 1e6:.0f} us to make, less than to pass it on: make batches larger."
        return "overhead", {"work_s": costs.work}, words
    transfer = run.mean("transfer")
    if transfer > 0.3 * period and transfer > 1e-3:
        words = (
            f"Finished batches lay {transfer * 1e3:.3g} ms before this process took note of them: its code holds the "
            "GIL, or blocks the event loop, for so long at a time."
        )
        return "consumer process", {"transfer_s": transfer}, words
    made = {worker: stage_times(block, "fetch") for worker, block in run.blocks.items() if worker >= 0}
    idle = sum(not times.number for times in made.values())
    if run.iterable and idle and run.batches > 2 * run.workers:
        words = (
            f"{idle} of {run.workers} workers had nothing to read: the stream has fewer parts (shards) than workers."
        )
        return "shards", {"idle_workers": float(idle)}, words
    means = sorted((times.total / times.number, worker) for worker, times in made.items() if times.number)
    if len(means) > 1 and means[-1][0] > 3 * means[(len(means) - 1) // 2][0] and means[-1][0] > period:
        slowest = means[-1][0] / means[(len(means) - 1) // 2][0]
        words = f"Worker {means[-1][1]} takes {slowest:.1f} times as long for a batch as the others."
        return "slow worker", {"slowest_ratio": slowest}, words
    order, fetch = run.mean("order"), run.stage("fetch")
    if run.in_order and order > 0.3 * period and fetch.p99 > 4 * fetch.p50 and fetch.p99 > 4 * period:
        words = (
            f"Batches were ready and waited {order * 1e3:.3g} ms for an earlier one: some take "
            f"{fetch.p99 / fetch.p50:.0f} times as long as most."
        )
        return "order", {"order_s": order, "fetch_p99_s": fetch.p99, "fetch_p50_s": fetch.p50}, words
    return None


def _dataset(run: Run) -> tuple[Bound, dict[str, float], str]:
    """Whether the samples cost computing, or waiting, or next to nothing."""
    costs = _costs(run)
    delayed = run.sum("delayed_s") / (run.workers * run.steady_s) if run.workers else 0.0
    load = costs.cpu * run.batches / (_allowed(run) * run.steady_s)
    others = _others(run)
    if delayed > 0.3 or (run.workers and load > 0.85 and (delayed > 0.15 or run.workers >= run.cpus)):
        words = f"All {run.cpus} CPUs are busy"
        if _allowed(run) < run.cpus:
            words = f"The {_allowed(run):.2g} CPUs that the control group's quota allows are used up"
        elif run.main_cpu_s > 1.3 * run.elapsed_s:
            words += (
                f", {run.main_cpu_s / run.elapsed_s:.1f} of them with this process (torch.set_num_threads limits it)"
            )
        elif others > _OTHERS:
            words += f", also with other programs, of which {others:.1f} want one at a time"
        evidence = {"load": load, "delayed_frac": delayed, "others": others}
        return "cpus", evidence, f"{words}: make samples cheaper."
    share = _computing(run)
    evidence = {"work_s": costs.work, "computing_frac": share}
    if share > 0.6:
        decode, fetch = run.mean("decode"), run.mean("fetch")
        what = "decode" if decode > fetch else "the dataset's code"
        return "compute", evidence, f"Samples cost computing ({share:.0%} of a batch's time, mostly in {what})."
    where = "its samples are read in this process" if not run.workers else "workers wait for their reads"
    return "fetch", evidence, f"Samples cost waiting: {where}, and compute {share:.0%} of the time."


def _computing(run: Run) -> float:
    """The part of the time of making batches that is computing."""
    delayed = run.sum("delayed_s")
    if not run.workers:
        sampled = run.sum("sampled_s")
        return min(1.0, run.sum("sampled_cpu_s") / (sampled - min(delayed, 0.9 * sampled))) if sampled else 1.0
    work = sum(run.stage(stage).total for stage in _work_stages(run))
    if run.asynchronous or run.threads:  # many at a time: compared with the time that the workers have
        work = run.workers * run.steady_s
    return min(1.0, run.sum("cpu_s") / max(1e-9, work - min(delayed, 0.9 * work)))


def _allowed(run: Run) -> float:
    return run.cpus if run.cpu_limit is None else min(run.cpus, run.cpu_limit)


def _others(run: Run) -> float:
    """How many threads of other programs want a CPU at a time.

    Where R threads share C CPUs evenly, each computes C / R of the time that it wants to. So what our processes got
    tells how many there are, and they know how many of those are their own.
    """
    delayed = run.sum("delayed_s")
    if not delayed:
        return 0.0
    computed, seconds = run.sum("cpu_s"), run.steady_s
    if not run.workers:
        computed, seconds = run.sum("sampled_cpu_s"), run.sum("sampled_s")
    got = computed / max(1e-9, computed + delayed)
    if got > 0.9:
        return 0.0
    own = (computed + delayed) / seconds + (run.main_cpu_s / run.elapsed_s if run.workers else 0.0)
    return max(0.0, _allowed(run) / got - own)


# ------------------------------------------------------------------------------------------- what would change it


def _work_stages(run: Run) -> tuple[Stage, ...]:
    overlapping = run.asynchronous or run.threads
    stages: tuple[Stage, ...] = ("fetch", "collate", "write")
    return stages if overlapping else (*stages, "decode", "first_read")


def _costs(run: Run) -> _Costs:
    consumer = run.mean("consumer")
    work = run.mean("fetch", "collate", "write") + (0.0 if run.asynchronous or run.threads else run.mean("decode"))
    latency = run.mean("fetch") if run.asynchronous else 0.0
    if run.workers:
        made = max(1, run.stage("write").number)
        delayed = run.sum("delayed_s") / made
        cpu = run.sum("cpu_s") / made + run.main_cpu_s / run.batches
        work = max(run.sum("cpu_s") / made, work - delayed)
        starts = max(1, round(run.stage("start_process").number / run.workers))
        taking = min(1e-3, max(_BATCH_COST_S / 3, run.main_cpu_s / run.batches - consumer))
        computing = min(work, run.sum("cpu_s") / made)
        return _Costs(consumer, taking, work, computing, cpu, latency, run.startup_s / starts)
    starting = _FORK_S if run.forks else _SPAWN_S
    work *= 1 - min(0.9, run.sum("delayed_s") / max(1e-9, run.sum("sampled_s")))
    cpu = run.main_cpu_s / run.batches
    return _Costs(consumer, _BATCH_COST_S / 3, work, work * _computing(run), cpu, latency, starting)


def _saving(run: Run) -> float:
    """The part of the time that went to saving states: of this process's time, or of the workers'."""
    of = {number: stage_times(block, "snapshot").total for number, block in run.blocks.items()}
    here = of.pop(-1, 0.0) / run.steady_s
    return min(1.0, max(here, sum(of.values()) / (max(1, run.workers) * run.steady_s)))


def _less_often(run: Run) -> tuple[dict[str, Any], float]:
    """Save states less often, so that it takes a fiftieth of the time at most."""
    share = _saving(run)
    every = next(number for number in (10, 100, 1000) if share / number <= 0.02)
    left = max(run.stage("consumer").total, run.steady_s * (1 - share * (1 - 1 / every)))
    return {"snapshot_every_n_steps": every * run.snapshot_every}, run.elapsed_s / (left + run.startup_s)


def _change(run: Run, bound: Bound) -> tuple[dict[str, Any], float]:
    """Return the options to change, and the factor that this should gain."""
    if bound == "ring" and run.ring_needed:
        return {"ring_bytes": run.ring_needed}, _ring_gain(run)
    if bound == "memory" and run.memory_limit is not None:
        return {"worker_memory_limit": 4 * run.memory_limit}, 1.5
    if bound == "consumer process" and run.prefetch_factor is not None and run.prefetch_factor < 4:
        ideal = _predicted(run, _costs(run), _Setting(run.workers, run.persistent, run.concurrency))
        gain = min(1.5, run.elapsed_s / max(ideal, 1e-9))
        return ({"prefetch_factor": 4}, gain) if gain > _WORTH else ({}, 1.0)
    if bound == "snapshots" and not run.keeps_states:
        return _less_often(run)
    if bound in ("snapshots", "sampler", "store", "shards", "slow worker", "ring", "memory", "order"):
        return {}, 1.0
    return _faster(run)


def _ring_gain(run: Run) -> float:
    """What slots for all batches would gain: memory that is used again is written three times as fast."""
    costs, now = _costs(run), _Setting(run.workers, run.persistent, run.concurrency)
    less = replace(costs, work=costs.work - run.mean("write") * 2 / 3, cpu=costs.cpu - run.mean("write") * 2 / 3)
    return _predicted(run, costs, now) / max(1e-9, _predicted(run, less, now))


def _faster(run: Run, *, any_order: bool = False) -> tuple[dict[str, Any], float]:
    """Search the settings whose effect can be predicted."""
    costs, now = _costs(run), _Setting(run.workers, run.persistent, run.concurrency)
    expected = max(run.elapsed_s, 1e-9)
    scale = expected / max(_predicted(run, costs, now), 1e-9)  # what the prediction leaves out
    best, best_s = now, expected
    for setting in _settings(run, any_order=any_order):
        seconds = _predicted(run, costs, setting) * min(1.3, max(1.0, scale))
        if seconds < best_s * 0.95:
            best, best_s = setting, seconds
    gain = expected / best_s
    if gain < _WORTH or best == now:
        return {}, 1.0
    change: dict[str, Any] = {}
    if best.workers != now.workers:
        change["num_workers"] = best.workers
    if best.persistent != now.persistent and best.workers:
        change["persistent_workers"] = best.persistent
    if best.concurrency != now.concurrency:
        change["concurrency"] = best.concurrency
    return change, gain


def _regardless_of_order(run: Run) -> tuple[int, float]:
    """The number of workers that would be best for a stream if its order did not matter, and what it would gain."""
    change, gain = _faster(run, any_order=True)
    return change.get("num_workers", run.workers), gain


def _settings(run: Run, *, any_order: bool) -> list[_Setting]:
    """Settings that give the same batches, in the same order unless `any_order`; those that use less come first."""
    workers = [run.workers]
    if any_order or not run.iterable:
        # The samples of a stream that are awaited come one after the other, too.
        waits = _computing(run) < 0.6 and (run.iterable or not (run.asynchronous or run.threads))
        most = max(run.cpus, _MOST_WAITING_WORKERS) if waits else run.cpus
        held_up = run.mean("transfer") > _HELD_UP_S  # this process would be no quicker at making batches
        least = 1 if held_up else 0
        workers = sorted(
            {run.workers, *(number for number in (0, 1, 2, 4, 8, 16, run.cpus) if least <= number <= most)}
        )
    several = [run.concurrency]
    if run.asynchronous and not run.iterable:
        several += [number for number in _CONCURRENCIES if number > run.concurrency]
    settings = [_Setting(number, run.persistent, concurrency) for number in workers for concurrency in several]
    if run.epochs > 1:
        settings += [setting._replace(persistent=True) for setting in settings if setting.workers]
    return settings


def _predicted(run: Run, costs: _Costs, setting: _Setting) -> float:
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
    cpu = costs.cpu + (0.0 if run.workers else _BATCH_COST_S)
    crowded = _CROWDED if number > run.cpus else 1.0
    period = max(costs.consumer + costs.taking, (making + _BATCH_COST_S) / number, cpu / _allowed(run) * crowded)
    starts = 1 if setting.persistent else run.epochs
    return run.batches * period + starts * costs.startup * (0.7 + 0.3 * number / max(1, run.workers))


def _making(run: Run, costs: _Costs, workers: int) -> tuple[float, float]:
    """Seconds that a worker takes for a batch if there are so many, and how many times longer computing takes because
    it shares the CPUs.
    """
    waiting, slower, others = costs.work - costs.computing, 1.0, _others(run)
    for _ in range(20):  # workers that compute for longer are more often in each other's way
        making = waiting + costs.computing * slower
        runnable = max(1, workers) * min(1.0, costs.computing * slower / max(1e-9, making))
        slower = (slower + max(1.0, (runnable + others) / _allowed(run))) / 2
    return waiting + costs.computing * slower, slower


def _doubt(run: Run, bound: Bound, change: Mapping[str, Any]) -> str:
    """Why the gain may be less; empty: it follows from what was measured."""
    if not change.keys() & {"num_workers", "concurrency"} and not run.iterable:
        return ""
    if bound == "fetch":
        return "no faster if the reads wait for a lock or a store that they share"
    return "less if other programs go on using the CPUs" if _others(run) > _OTHERS else ""


def _advice(run: Run, bound: Bound, words: str, change: Mapping[str, Any], gain: float, doubt: str) -> str:
    if change:
        options = ", ".join(f"{name}={value!r}" for name, value in change.items())
        text = f"{words} Set {options}: about {gain:.1f} times as fast."
        if doubt:
            text = f"{words} Try {options}: up to {gain:.1f} times as fast; {doubt}."
        if change.get("num_workers", 0) > run.cpus:
            text += f" Workers that wait may be more than the {run.cpus} CPUs that torch suggests."
        return text
    if bound == "order":
        return f"{words} in_order=False delivers them as they are ready, if any order will do."
    if bound == "snapshots":
        return f"{words} snapshot_every_n_steps=0 saves none; then a run can be resumed at the end of an epoch only."
    if bound == "startup" and run.epochs == 1 and not run.persistent:
        return f"{words} If more epochs follow, persistent_workers=True starts them once."
    if run.iterable and bound in ("compute", "fetch"):
        number, gain = _regardless_of_order(run)
        if number == run.workers:
            return f"{words} Other numbers of workers would gain little."
        most = "up to" if doubt else "about"
        parts = ", if the stream has as many parts (shards) to share out" if number > run.workers else ""
        return (
            f"{words} num_workers={number} would make it {most} {gain:.1f} times as fast{parts}; but it changes the "
            "order of the samples."
        )
    if bound in ("compute", "fetch"):
        return f"{words} Other numbers of workers would gain little."
    return words
