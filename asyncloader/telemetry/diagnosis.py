"""Judges what bounds a run: where a batch's time went, and what the consumer waited for. Pure.

Data path: run_figures -> [diagnosis] -> explain.

`diagnose` first asks whether the consumer waits at all: a consumer that hardly does is the bound itself. Then it names
the stage that took most of the time, and the worker, the shards or the samples that were slow. These are facts; what
another setting would gain is not among them, as only a trial shows it. Settings that are worth trying are named
(`Diagnosis.candidates`): each is an option that acts on the cause of the waiting, and alters neither order nor samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from asyncloader.telemetry.counters import stage_times
from asyncloader.telemetry.run_figures import BATCH_COST_S, CONCURRENCY, MOST_WAITING_WORKERS, Run
from asyncloader.telemetry.slow_samples import in_words, slowest

_MOST = 3
_MOST_IN_FLIGHT = 1024
_MOST_THREADS = 64
_SAVED_STARTS = 0.02  # the share of starts in the time from which they are worth saving
_SAVED = 0.02  # the share of saving states in the time that is left


def candidates(run: Run, bound: str) -> tuple[dict[str, Any], ...]:
    """Return the settings to try, at most three, the likeliest first.

    Args:
        run: its figures.
        bound: the verdict on it.
    """
    found: list[dict[str, Any]] = []
    for each in _settings(run, bound):
        if each not in found and not each.keys() & run.automatic:
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
    if run.workers and not run.persistent and run.epochs > 1 and run.startup_s > _SAVED_STARTS * run.elapsed_s:
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


Bound = Literal[
    "unknown", "consumer", "startup", "snapshots", "sampler", "store", "memory", "ring", "consumer process",
    "slow worker", "shards", "cpus", "overhead", "compute", "fetch",
]  # fmt: skip
"""What bounds a run: nothing that can be judged yet; the consumer; starting workers; saving states of the dataset or
the sampler; the sampler; a store that fails; the memory limit of workers; rings that are too small; a consumer's
process that does not get to take batches; one worker; shards that are fewer than workers; all CPUs; the fixed cost of
each batch; the dataset's computing; the dataset's waiting.
"""

_LEAST_BATCHES = 8
_LEAST_SECONDS = 0.05
_HEALTHY_WAIT = 0.05
_SAVING = 0.25  # the share of saving states in the time from which it is the bound
_STARTING = 0.35  # the share of starts in the waiting from which they are the bound
_STARTING_ONCE = 0.5  # of one epoch's start in the whole time
_WRITING = 0.15  # the share of writing in a worker's time for a batch from which rings that are too small matter
_OF_SAMPLES: tuple[Bound, ...] = ("slow worker", "cpus", "compute", "fetch")
_OTHERS = 0.5  # CPUs of other programs, from which they are mentioned


class Diagnosis(NamedTuple):
    """What bounds a run.

    Attributes:
        bound: what bounds it; see `Bound`.
        evidence: the figures that show it, in seconds per batch or as shares.
        text: the same, and the candidates, in a few sentences.
        candidates: settings that are worth trying, at most three, the likeliest first; ``loader.clone(**each)`` makes
            a loader with them. They alter neither order nor samples. Their gain is not known: `asyncloader try`
            measures it. Empty where the consumer is the bound, the run was too short to judge, or no option acts on
            the bound.
    """

    bound: Bound
    evidence: Mapping[str, float]
    text: str
    candidates: Sequence[Mapping[str, Any]] = ()


def diagnose(run: Run) -> Diagnosis:
    """Judge a run."""
    bound, evidence, text = _judged(run)
    tries = candidates(run, bound)
    if tries:
        settings = "; ".join(", ".join(f"{name}={value!r}" for name, value in each.items()) for each in tries)
        text += f" Worth trying: {settings}. asyncloader try measures {'them' if len(tries) > 1 else 'it'}."
    return Diagnosis(bound, evidence, text, tries)


def _judged(run: Run) -> tuple[Bound, dict[str, float], str]:
    """Return the bound, the figures that show it, and sentences."""
    if not run.batches:
        return "unknown", {}, "Nothing was loaded yet."
    if run.elapsed_s < _LEAST_SECONDS or run.batches < _LEAST_BATCHES:
        return "unknown", {}, f"{run.batches} batches in {run.elapsed_s:.2f} s are too few to judge."
    waited = min(1.0, run.wait_s / run.elapsed_s)
    if run.epochs == 1:  # its start will not come again
        waited = min(waited, max(0.0, run.wait_s - run.startup_s) / run.steady_s)
    evidence = {"wait_frac": waited}
    if waited < _HEALTHY_WAIT:
        text = f"Consumer-bound: it waited for data {waited:.0%} of the time; the loader keeps up, nothing to change."
        return "consumer", evidence, text
    bound, more, words = _bound(run)
    slow, sentences = _slow_samples(run) if bound in _OF_SAMPLES else ({}, "")
    text = f"Input-bound: the consumer waited {waited:.0%} of the time. {words}{sentences}{_remark(run, bound)}"
    return bound, {**evidence, **more, **slow}, text


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
    if run.saving > _SAVING:
        each = run.mean("snapshot")
        words = f"Saving states took {run.saving:.0%} of the time, {each * 1e3:.3g} ms each (state_dict)."
        return "snapshots", {"snapshot_frac": run.saving, "snapshot_s": each}, words
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
            f"The store failed {tries:.0f} of {run.sum('requests'):.0f} requests, and {backoff:.3g} s went by until "
            "they were tried again: ask less of it at a time, or have it scaled up."
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
    if run.oversize * 2 > run.batches and run.mean("write") > _WRITING * run.work_s:
        words = f"{run.oversize} of {run.batches} batches did not fit into the rings, and got memory of their own."
        return "ring", {"oversize_frac": run.oversize / run.batches}, words
    if run.ring_copies * 2 > run.batches:
        words = f"{run.ring_copies} of {run.batches} batches were copied out of the rings: hold fewer at a time."
        return "ring", {"copied_frac": run.ring_copies / run.batches}, words
    if run.work_s < BATCH_COST_S:
        words = f"A batch takes {run.work_s * 1e6:.0f} us to make, less than to pass it on: make batches larger."
        return "overhead", {"work_s": run.work_s}, words
    if run.held_up:
        transfer = run.mean("transfer")
        code = "its code or that of the samples" if run.in_threads else "its code"
        words = (
            f"Finished batches lay {in_words(transfer)} before this process took note of them: {code} holds the GIL, "
            "or blocks the event loop, for so long at a time."
        )
        return "consumer process", {"transfer_s": transfer}, words
    made = {worker: stage_times(block, "fetch") for worker, block in run.blocks.items() if worker >= 0}
    idle = sum(not times.number for times in made.values())
    if run.iterable and idle and run.batches > 2 * run.workers:
        words = f"{idle} of {run.workers} workers had nothing to read: the stream has fewer parts (shards)."
        return "shards", {"idle_workers": float(idle)}, words
    means = sorted((times.total / times.number, worker) for worker, times in made.items() if times.number)
    # The lower median: of two workers the slower is compared with the other, not with itself.
    if len(means) > 1 and means[-1][0] > 3 * means[(len(means) - 1) // 2][0] and means[-1][0] > period:
        ratio = means[-1][0] / means[(len(means) - 1) // 2][0]
        words = f"Worker {means[-1][1]} takes {ratio:.1f} times as long for a batch as the others."
        return "slow worker", {"slowest_ratio": ratio}, words
    return None


def _dataset(run: Run) -> tuple[Bound, dict[str, float], str]:
    """Whether the samples cost computing, or waiting, or next to nothing."""
    delayed = run.sum("delayed_s") / (run.workers * run.steady_s) if run.workers else 0.0
    load = run.cpu_s * run.batches / (run.allowed_cpus * run.steady_s)
    if delayed > 0.3 or (run.workers and load > 0.85 and (delayed > 0.15 or run.workers >= run.cpus)):
        words = f"All {run.cpus} CPUs are busy"
        if run.allowed_cpus < run.cpus:
            words = f"The {run.allowed_cpus:.2g} CPUs that the control group's quota allows are used up"
        elif run.main_cpu_s > 1.3 * run.elapsed_s:
            own = run.main_cpu_s / run.elapsed_s
            words += f", {own:.1f} of them with this process (torch.set_num_threads limits it)"
        elif run.others_cpu > _OTHERS:
            words += f", {run.others_cpu:.1f} of them with other programs"
        return (
            "cpus",
            {"load": load, "delayed_frac": delayed, "others_cpu": run.others_cpu},
            f"{words}: make samples cheaper.",
        )
    share = run.computing_share
    evidence = {"work_s": run.work_s, "computing_frac": share}
    if run.computes:
        decode, fetch = run.mean("decode"), run.mean("fetch")
        what = "decode" if decode > fetch else "the dataset's code"
        return "compute", evidence, f"Samples cost computing ({share:.0%} of a batch's time, mostly in {what})."
    where = "its samples are read in this process" if not run.workers else "workers wait for their reads"
    return "fetch", evidence, f"Samples cost waiting: {where}, and compute {share:.0%} of the time."


def _slow_samples(run: Run) -> tuple[dict[str, float], str]:
    """Samples that hold up the others, and batches behind them, if any: figures, and sentences."""
    evidence, words = dict[str, float](), ""
    order, period, fetch = run.mean("order"), run.steady_s / run.batches, run.stage("fetch")
    if run.workers and run.in_order and order > 0.3 * period and fetch.p99 > 4 * fetch.p50 and fetch.p99 > 4 * period:
        evidence["order_s"] = order
        words = f" Finished batches waited {in_words(order)} for an earlier one."
    slow, sentence = slowest(run.slow, run.sum("delayed_s"))
    return {**evidence, **slow}, words + sentence


def _remark(run: Run, bound: Bound) -> str:
    """What no option of the candidates can change."""
    if bound == "snapshots" and run.keeps_states:
        return " snapshot_every_n_steps=0 saves none; then a run can be resumed at the end of an epoch only."
    if bound == "startup" and run.epochs == 1 and not run.persistent:
        return " If more epochs follow, persistent_workers=True starts them once."
    if bound not in ("cpus", "compute", "fetch"):
        return ""
    if run.in_threads and (run.gil_held or bound != "fetch"):
        return " Threads share the GIL; worker processes have a GIL each."
    if run.iterable and run.streams is None:
        return " Another number of workers would alter the order of the stream's samples."
    return ""
