"""Describes a running loader as a plain dictionary, which the terminal view, the page and notebooks show. Pure.

Data path: reading -> [snapshot] -> top, page, `_repr_html_`.

Rates are those between two readings; without an earlier reading, those of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncloader.telemetry.counters import STAGES, Stage, stage_sum
from asyncloader.telemetry.diagnosis import Diagnosis
from asyncloader.telemetry.figures import NODE_FIGURES, STAGE_HELP

VERSION = 5
"""Of the dictionary; grows when a key changes its meaning or goes."""

# The stages in which a worker makes a batch, and those of this process that a waiting consumer may wait for.
_MADE: tuple[Stage, ...] = ("fetch", "decode", "collate", "write", "transfer")
_HERE: tuple[Stage, ...] = ("sampler", "snapshot", "pin", "h2d")
_AT_WORK: dict[Stage, str] = {
    "start_dataset": "starting the dataset",
    "first_read": "opening files and connections",
    "snapshot": "saving the dataset's state",
    "fetch": "reading samples",
    "decode": "decoding",
    "collate": "collating",
    "write": "writing to the ring",
}
_LONG_S = 1.0  # of a wait or a task that is mentioned with its seconds
_ENDED = ("zombie", "unknown")


class WorkerReading(NamedTuple):
    """One worker at a moment.

    Attributes:
        worker: its number.
        place: its process, thread or connection, as in "pid 17".
        ready: it runs.
        started: the user's start-up code in it is over.
        outstanding: tasks that it was sent and has not answered.
        answers: tasks that it has answered.
        state: its process's state, as `stacks.process_state` says it; empty where it has no process here.
        slots: of its ring; 0: it has no ring.
        slots_in_use: of these, assigned to tasks, or held by the consumer.
        ring_bytes: size of the ring.
    """

    worker: int
    place: str
    ready: bool
    started: bool
    outstanding: int
    answers: int
    state: str
    slots: int
    slots_in_use: int
    ring_bytes: int


class Reading(NamedTuple):
    """A loader at a moment.

    Attributes:
        name: its class and dataset.
        pid: its process.
        time: seconds since 1970.
        clock: seconds of a clock that never goes back.
        place: its position, in words.
        closed: whether it was closed.
        stats: as its `stats()`; figures that are missing are not shown.
        epochs: iterators that began.
        elapsed_s: seconds spent iterating.
        waiting_s: for so long the consumer has waited for the next batch; None: it does not wait.
        blocks: the counts of each process, by the worker's number; -1: this process.
        workers: of the newest iterator, while they run.
        decodes_apart: whether decoding is no part of the time of fetching.
        verdict: None before the first batch.
    """

    name: str
    pid: int
    time: float
    clock: float
    place: str
    closed: bool
    stats: Mapping[str, float]
    epochs: int
    elapsed_s: float
    waiting_s: float | None
    blocks: Mapping[int, Sequence[float]]
    workers: Sequence[WorkerReading]
    decodes_apart: bool
    verdict: Diagnosis | None


class Snapshots:
    """Makes the dictionaries of successive readings of one loader."""

    def __init__(self) -> None:
        self._before: Reading | None = None
        self._since: dict[str, tuple[int, float]] = {}  # by a worker's place: its answers, and when they last changed

    def take(self, now: Reading) -> dict[str, Any]:
        """Describe a reading. The dictionary has plain values only, and can be written as JSON."""
        before, self._before = self._before, now
        interval = now.clock - before.clock if before else now.elapsed_s
        grown = _Growth(now, before, max(interval, 1e-9))
        self._since = {each.place: self._changed(each, now.clock) for each in now.workers}
        stats = now.stats
        return {
            "version": VERSION,
            "kind": "loader",
            "name": now.name,
            "pid": now.pid,
            "time": now.time,
            "place": now.place,
            "state": _state(now, grown),
            "waiting_s": now.waiting_s,
            "rates": {
                "interval_s": interval,
                **{f"{name}_per_s": grown.rate(f"data/{name}") for name in ("batches", "samples", "bytes")},
                "wait_frac": min(1.0, grown.rate("data/wait_s")),
            },
            "wait_by_stage": _wait_by_stage(now, grown),
            "totals": {
                "epochs": now.epochs,
                "elapsed_s": now.elapsed_s,
                **{name: stats[f"data/{name}"] for name in _TOTALS},
            },
            "stages": _stages(stats),
            "workers": [
                _worker(worker, now, grown, now.clock - self._since[worker.place][1]) for worker in now.workers
            ],
            "store": _store(stats),
            "nodes": _nodes(stats),
            "verdict": _verdict(now.verdict),
        }

    def _changed(self, worker: WorkerReading, clock: float) -> tuple[int, float]:
        answers, since = self._since.get(worker.place, (-1, clock))
        return worker.answers, since if answers == worker.answers and worker.outstanding else clock


def _worker(worker: WorkerReading, now: Reading, grown: _Growth, since: float) -> dict[str, Any]:
    spent: dict[Stage, float] = {stage: grown.seconds(worker.worker, stage) for stage in _AT_WORK}
    if not now.decodes_apart:
        spent["decode"] = 0.0
    return {
        "worker": worker.worker,
        "place": worker.place,
        "activity": _activity(worker, spent, since),
        "tasks": worker.outstanding,
        "batches": worker.answers,
        "busy_frac": min(1.0, sum(spent.values()) / grown.interval),
        "slots": worker.slots,
        "slots_in_use": worker.slots_in_use,
        "ring_bytes": worker.ring_bytes,
    }


_TOTALS = (
    "batches",
    "samples",
    "bytes",
    "wait_s",
    "wait_frac",
    "batches_per_sec",
    "samples_per_sec",
    "queue_depth",
    "time_to_first_batch_s",
    "worker_restarts",
    "worker_retirements",
    "skipped_samples",
    "ring_copies",
    "oversize_batches",
)


class _Growth:
    """What two readings differ by."""

    def __init__(self, now: Reading, before: Reading | None, interval: float) -> None:
        self.interval = interval
        self._now, self._before = now, before

    def number(self, key: str) -> float:
        before = self._before.stats.get(key, 0.0) if self._before else 0.0
        # Not below 0: a loader's first batches may be counted while it is read.
        return max(0.0, self._now.stats.get(key, 0.0) - before)

    def rate(self, key: str) -> float:
        return self.number(key) / self.interval

    def seconds(self, process: int, stage: Stage) -> float:
        """The seconds that a process has added to a stage. -1: the main process."""
        block = self._now.blocks.get(process)
        if block is None:
            return 0.0
        before = self._before.blocks.get(process) if self._before else None
        return max(0.0, stage_sum(block, stage) - (stage_sum(before, stage) if before is not None else 0.0))


def _state(now: Reading, grown: _Growth) -> str:
    if now.closed:
        return "closed"
    if now.waiting_s is not None and now.waiting_s > _LONG_S:
        return "waiting"
    return "running" if grown.number("data/batches") else "idle"


def _wait_by_stage(now: Reading, grown: _Growth) -> list[dict[str, Any]]:
    """Divide the share of waiting between the stages, the largest first.

    Starting workers has the time that it took. The rest is divided in proportion to the seconds that a batch takes in
    each stage, those in workers divided by the number of workers, which work at the same time.
    """
    waited = min(1.0, grown.rate("data/wait_s"))
    started = min(waited, grown.rate("data/startup_s"))
    shares = {"start": started} if started else {}
    processes = [each for each in now.blocks if each >= 0]
    seconds: dict[str, float] = {}
    for stage in (*_MADE, *_HERE):
        if stage == "decode" and not now.decodes_apart:
            continue
        inside = sum(grown.seconds(each, stage) for each in processes)
        seconds[stage] = inside / max(1, len(processes)) + grown.seconds(-1, stage)
    if whole := sum(seconds.values()):
        shares |= {stage: (waited - started) * each / whole for stage, each in seconds.items()}
    rows = sorted(shares.items(), key=lambda pair: -pair[1])
    return [{"stage": stage, "share": share} for stage, share in rows if share > 0.0005]


def _stages(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    names = ("count", "sum_s", "p50_s", "p95_s", "p99_s")
    return [
        {
            "stage": stage,
            "help": STAGE_HELP[stage],
            **{name: stats[f"stage/{stage}/{name}"] for name in names},
        }
        for stage in STAGES
        if f"stage/{stage}/count" in stats
    ]


def _store(stats: Mapping[str, float]) -> dict[str, float]:
    """The figures of stores that are not 0."""
    return {key: value for key, value in stats.items() if key.startswith("store/") and value}


def _nodes(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    ends = "/workers"
    addresses = [key[len("node/") : -len(ends)] for key in stats if key.startswith("node/") and key.endswith(ends)]
    return [
        {"address": address, **{name: stats[f"node/{address}/{name}"] for name in NODE_FIGURES}}
        for address in addresses
    ]


def _activity(worker: WorkerReading, spent: Mapping[Stage, float], since: float) -> str:
    """A worker's activity since the reading before, or now."""
    if worker.state in _ENDED:
        return "ended"
    if worker.state.startswith(("stopped", "waiting for a disk")):
        return worker.state
    if not worker.ready:
        return "starting"
    if not worker.started:
        return _AT_WORK["start_dataset"]
    if not worker.outstanding:
        return "idle: it has no task"
    if since > _LONG_S:
        return f"at one task for {since:.0f} s" + (f", {worker.state}" if worker.state else "")
    whole = sum(spent.values())
    if not whole:
        return "at a task"
    most = sorted(spent.items(), key=lambda pair: -pair[1])[:2]
    return ", ".join(f"{_AT_WORK[stage]} {each / whole:.0%}" for stage, each in most if each > 0.005 * whole)


def _verdict(verdict: Diagnosis | None) -> dict[str, Any]:
    if verdict is None:
        return {"bound": "unknown", "ok": True, "text": "Nothing was loaded yet.", "evidence": {}, "candidates": []}
    return {
        "bound": verdict.bound,
        "ok": verdict.bound in ("unknown", "consumer"),
        "text": verdict.text,
        "evidence": {name: float(value) for name, value in verdict.evidence.items()},
        "candidates": [{name: repr(value) for name, value in each.items()} for each in verdict.candidates],
    }


def summary(snapshot: Mapping[str, Any]) -> dict[str, str]:
    """Return the most telling figures as texts, by name: a notebook's table, or the lines of a terminal."""
    rates, totals, verdict = snapshot["rates"], snapshot["totals"], snapshot["verdict"]
    by_stage = ", ".join(f"{each['stage']} {each['share']:.0%}" for each in snapshot["wait_by_stage"][:3])
    texts = {
        "rate": f"{rates['batches_per_s']:.3g} batches/s, {rates['samples_per_s']:.3g} samples/s",
        "waits": f"{rates['wait_frac']:.0%} of the time" + (f": {by_stage}" if by_stage else ""),
        "delivered": f"{totals['batches']:.0f} batches, {totals['samples']:.0f} samples",
    }
    if lost := totals["worker_restarts"] + totals["worker_retirements"]:
        texts["workers replaced"] = f"{lost:.0f}"
    if skipped := totals["skipped_samples"]:
        texts["samples skipped"] = f"{skipped:.0f}"
    return {**texts, "verdict": verdict["text"]}
