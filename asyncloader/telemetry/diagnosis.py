"""Judges what bounds a run, and which options would make it faster. Pure.

Data path: run_figures -> prediction -> [diagnosis] -> explain.

`diagnose` first asks whether there is anything to gain: a consumer that hardly waits is the bound itself. Then it names
the stage that took most of the time, and predicts how long the same run would have taken with other numbers of workers,
with persistent workers, with more samples in flight. A change is proposed only if it can act here, if it alters neither
order nor samples, and if the predicted gain is worth it; other advice is in the text alone.

How long computing will take can be predicted (`prediction.py`), so a gain is promised. How long waiting will take
cannot: reads of several workers may wait for one lock, or for a store that answers no faster; and other programs come
and go. There the gain is an upper bound, and the text says so (`Diagnosis.promise`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from asyncloader.telemetry.counters import stage_times
from asyncloader.telemetry.prediction import BATCH_COST_S, WORTH, costs_of, expected_s, faster, ring_gain
from asyncloader.telemetry.run_figures import Run

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
process that does not get to take batches; batches that wait for an earlier batch; one worker; shards that are fewer
than workers; all CPUs; the fixed cost of each batch; the dataset's computing; the dataset's waiting.
"""

Promise = Literal["about", "at least", "up to"]

_AT_LEAST: tuple[Bound, ...] = ("startup", "overhead", "ring")
_LEAST_BATCHES = 8
_LEAST_SECONDS = 0.05
_HEALTHY_WAIT = 0.05
_SAVING = 0.25  # the share of saving states in the time from which it is the bound
_STARTING = 0.35  # the share of starts in the waiting from which they are the bound
_STARTING_ONCE = 0.5  # of one epoch's start in the whole time
_OTHERS = 0.5  # threads of other programs, from which they are mentioned


class Diagnosis(NamedTuple):
    """What bounds a run, and what would make it faster.

    Attributes:
        bound: what bounds it; see `Bound`.
        evidence: the figures that show it, in seconds per batch or as shares.
        change: options and their new values; ``loader.clone(**change)`` applies them. Empty where nothing is to be
            gained, the run was too short to judge, or what would help is not an option, or would alter the order.
        gain: the factor by which the run should become faster with the change; 1 without one.
        text: the same in one or two sentences.
        promise: "about": the gain follows from the measured times; "at least": it is more where batches cost less than
            was measured, as without workers, and in workers and memory that are used again; "up to": only a trial shows
            whether several workers wait no longer for their reads than a single worker does, and get CPUs.
    """

    bound: Bound
    evidence: Mapping[str, float]
    change: Mapping[str, Any]
    gain: float
    text: str
    promise: Promise = "about"


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
    promise: Promise = "up to" if doubt else "at least" if bound in _AT_LEAST else "about"
    text = f"{head}. {_advice(run, bound, words, change, gain, promise, doubt)}"
    return Diagnosis(bound, evidence, change, gain, text, promise)


# ------------------------------------------------------------------------------------------------ what bounds it


def _bound(run: Run) -> tuple[Bound, dict[str, float], str]:
    """Return the reason for which the consumer waited, the figures that show it, and a sentence."""
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
    """A fault outside of the dataset's code, if any."""
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
        if run.forks:
            words += " A large list or dict of the dataset does, as forked workers read it: share() keeps one for all."
        return "memory", {"retirements": float(run.retirements)}, words
    return None


def _workers_trouble(run: Run) -> tuple[Bound, dict[str, float], str] | None:
    """What keeps finished work from the consumer, or workers from working."""
    period = run.steady_s / run.batches
    if run.oversize * 2 > run.batches and ring_gain(run) > WORTH:
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
    costs = costs_of(run)
    if costs.work < BATCH_COST_S:
        words = f"A batch takes {costs.work * 1e6:.0f} us to make, less than to pass it on: make batches larger."
        return "overhead", {"work_s": costs.work}, words
    if run.held_up:
        transfer = run.mean("transfer")
        words = (
            f"Finished batches lay {transfer * 1e3:.3g} ms before this process took note of them: "
            f"{'its code or that of the samples' if run.in_threads else 'its code'} holds the GIL, or blocks the event "
            "loop, for so long at a time."
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
    # The lower median: of two workers the slower is compared with the other, not with itself.
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
    costs = costs_of(run)
    delayed = run.sum("delayed_s") / (run.workers * run.steady_s) if run.workers else 0.0
    load = costs.cpu * run.batches / (run.allowed_cpus * run.steady_s)
    others = run.other_threads
    if delayed > 0.3 or (run.workers and load > 0.85 and (delayed > 0.15 or run.workers >= run.cpus)):
        words = f"All {run.cpus} CPUs are busy"
        if run.allowed_cpus < run.cpus:
            words = f"The {run.allowed_cpus:.2g} CPUs that the control group's quota allows are used up"
        elif run.main_cpu_s > 1.3 * run.elapsed_s:
            words += (
                f", {run.main_cpu_s / run.elapsed_s:.1f} of them with this process (torch.set_num_threads limits it)"
            )
        elif others > _OTHERS:
            words += f", also with other programs, of which {others:.1f} want one at a time"
        evidence = {"load": load, "delayed_frac": delayed, "others": others}
        return "cpus", evidence, f"{words}: make samples cheaper."
    share = run.computing_share
    evidence = {"work_s": costs.work, "computing_frac": share}
    if share > 0.6:
        decode, fetch = run.mean("decode"), run.mean("fetch")
        what = "decode" if decode > fetch else "the dataset's code"
        return "compute", evidence, f"Samples cost computing ({share:.0%} of a batch's time, mostly in {what})."
    where = "its samples are read in this process" if not run.workers else "workers wait for their reads"
    return "fetch", evidence, f"Samples cost waiting: {where}, and compute {share:.0%} of the time."


# ------------------------------------------------------------------------------------------- what would change it


def _saving(run: Run) -> float:
    """The part of the time that went to saving states: of this process's time, or of the workers'."""
    of = {number: stage_times(block, "snapshot").total for number, block in run.blocks.items()}
    here = of.pop(-1, 0.0) / run.steady_s
    return min(1.0, max(here, sum(of.values()) / (max(1, run.workers) * run.steady_s)))


def _less_often(run: Run) -> tuple[dict[str, Any], float]:
    """Save states less often, so that it takes a fiftieth of the time at most."""
    share = _saving(run)
    # Always found: a share is at most 1, so 100 is enough.
    every = next(number for number in (10, 100, 1000) if share / number <= 0.02)
    left = max(run.stage("consumer").total, run.steady_s * (1 - share * (1 - 1 / every)))
    return {"snapshot_every_n_steps": every * run.snapshot_every}, run.elapsed_s / (left + run.startup_s)


def _change(run: Run, bound: Bound) -> tuple[dict[str, Any], float]:
    """Return the options to change, and the factor that this should gain."""
    if run.in_threads and not _is_predictable_in_threads(run, bound):
        return {}, 1.0
    if bound == "ring" and run.ring_needed:
        return {"ring_bytes": run.ring_needed}, ring_gain(run)
    if bound == "memory" and run.memory_limit is not None:
        return {"worker_memory_limit": 4 * run.memory_limit}, 1.5
    if bound == "consumer process" and run.prefetch_factor is not None and run.prefetch_factor < 4:
        gain = min(1.5, run.elapsed_s / max(expected_s(run), 1e-9))
        return ({"prefetch_factor": 4}, gain) if gain > WORTH else ({}, 1.0)
    if bound == "snapshots" and not run.keeps_states:
        return _less_often(run)
    if bound in ("snapshots", "sampler", "store", "shards", "slow worker", "ring", "memory", "order"):
        return {}, 1.0
    return faster(run)


def _is_predictable_in_threads(run: Run, bound: Bound) -> bool:
    """Whether it is known what other numbers of worker threads would do. How much of computing holds the GIL is not."""
    return bound in ("snapshots", "overhead") or (bound == "fetch" and not run.gil_held and not run.threads)


def _regardless_of_order(run: Run) -> tuple[int, float]:
    """The number of workers that would be best for a stream if its order did not matter, and the gain."""
    change, gain = faster(run, any_order=True)
    return change.get("num_workers", run.workers), gain


def _doubt(run: Run, bound: Bound, change: Mapping[str, Any]) -> str:
    """Why the gain may be less; empty: it follows from the measured times."""
    if not change.keys() & {"num_workers", "concurrency"} and not run.iterable:
        return ""
    if bound == "fetch":
        return "no faster if the reads wait for a lock or a store that they share"
    return "less if other programs go on using the CPUs" if run.other_threads > _OTHERS else ""


def _advice(
    run: Run, bound: Bound, words: str, change: Mapping[str, Any], gain: float, promise: Promise, doubt: str
) -> str:
    if change:
        options = ", ".join(f"{name}={value!r}" for name, value in change.items())
        text = f"{words} {'Try' if doubt else 'Set'} {options}: {promise} {gain:.1f} times as fast"
        text += f"; {doubt}." if doubt else "."
        if change.get("num_workers", 0) > run.cpus:
            text += f" Workers that wait may be more than the {run.cpus} CPUs that torch suggests."
        return text
    if bound == "order":
        return f"{words} in_order=False delivers them as they are ready, if any order will do."
    if bound == "snapshots":
        return f"{words} snapshot_every_n_steps=0 saves none; then a run can be resumed at the end of an epoch only."
    if bound == "startup" and run.epochs == 1 and not run.persistent:
        return f"{words} If more epochs follow, persistent_workers=True starts them once."
    if run.in_threads and not _is_predictable_in_threads(run, bound):
        held = (
            "Code that holds the GIL gains nothing from more threads"
            if run.gil_held
            else ("More threads gain as much as the samples' code releases the GIL, which a trial shows")
        )
        return f"{words} {held}; worker processes have a GIL each."
    if run.iterable and bound in ("compute", "fetch"):
        number, gain = _regardless_of_order(run)
        if number == run.workers:
            return f"{words} Other numbers of workers would gain little."
        parts = ", if the stream has as many parts (shards) to share out" if number > run.workers else ""
        return (
            f"{words} num_workers={number} would make it {promise} {gain:.1f} times as fast{parts}; but it changes the "
            "order of the samples."
        )
    if bound in ("compute", "fetch"):
        return f"{words} Other numbers of workers would gain little."
    return words
