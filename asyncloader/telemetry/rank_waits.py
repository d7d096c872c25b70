"""Compares how long the ranks of a run wait for their batches, and names those that starve, with the reason. Pure.

Data path: statistics -> [rank_waits] -> ranks.watch -> explain, log.

Each rank measures itself (`WaitWindow`): the share of the last 15 to 30 seconds that its consumer waited, and the stage
that took most of that time. `compare` puts the ranks in the order of their shares.
Those above the first clear gap starve: a rank behind the gap waits at least twice as long as the rank before it, and
at least 5 % of the time longer. If the shares have no such gap, no rank stands out.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.telemetry.counters import STAGES, Stage, stage_times

Block = npt.NDArray[np.float64]

_WINDOW_S = 15.0
_LEAST_BATCHES = 8
_LEAST_S = 0.5
_GAP = 0.05  # of the time
_FACTOR = 2.0
_TRANSFER_S = 1e-3  # above it this process did not take note of finished batches at once
_TRANSFER_SHARE = 0.3

_MOST_HOST = 64  # characters
_MOST_BYTES = 1 << 10
_MOST_RUNS = 8  # runs of ranks in a sentence
_MOST_HOSTS = 3

_MAKING: tuple[Stage, ...] = ("snapshot", "fetch", "decode", "collate", "write")
_PASSING: tuple[Stage, ...] = ("sampler", "pin", "h2d")

_REASONS: dict[Stage, str] = {
    "sampler": "the sampler",
    "snapshot": "saved states",
    "fetch": "worker fetches",
    "decode": "decoding",
    "collate": "collation",
    "write": "writes to shared memory",
    "transfer": "the training process to take finished batches",
    "pin": "copies to page-locked memory",
    "h2d": "copies to the device",
}
"""The stages that `WaitWindow` names, as the end of "waits for"."""


class RankWait(NamedTuple):
    """How one rank waited for batches lately.

    Attributes:
        host: name of its machine.
        batches: that it has got so far.
        share: of the time that its consumer waited, from 0 to 1.
        stage: that took most of the time, and so is the reason.
        workers: their number.
    """

    host: str
    batches: int
    share: float
    stage: Stage
    workers: int


class Comparison(NamedTuple):
    """What distinguishes the ranks.

    Attributes:
        text: a sentence without a full stop; empty if fewer than two ranks are known.
        starving: the ranks that stand out, with their stages.
    """

    text: str
    starving: tuple[tuple[int, Stage], ...]


class _Moment(NamedTuple):
    elapsed_s: float
    wait_s: float
    batches: int
    blocks: Mapping[int, Block]


class WaitWindow:
    """Measures the last 15 to 30 seconds of iterating; longer, if they have fewer than 8 batches."""

    def __init__(self) -> None:
        self._marks: deque[_Moment] = deque([_Moment(0.0, 0.0, 0, {})], maxlen=2)

    def measure(
        self, host: str, elapsed_s: float, wait_s: float, batches: int, blocks: Mapping[int, Block]
    ) -> RankWait | None:
        """Return the figures of the window, or None if it is still too short.

        Args:
            host: name of this machine.
            elapsed_s: seconds of iterating so far, without starts of workers.
            wait_s: of those, waited by the consumer.
            batches: so far.
            blocks: counts and times of each process so far, by the worker's number; -1: this process.
        """
        now, first, last = _Moment(elapsed_s, wait_s, batches, blocks), self._marks[0], self._marks[-1]
        if elapsed_s - last.elapsed_s >= _WINDOW_S and batches - last.batches >= _LEAST_BATCHES:
            self._marks.append(now)
        passed, got = elapsed_s - first.elapsed_s, batches - first.batches
        if passed < _LEAST_S or got < _LEAST_BATCHES:
            return None
        since = {worker: block - first.blocks.get(worker, 0.0) for worker, block in blocks.items()}
        share = min(1.0, max(0.0, (wait_s - first.wait_s) / passed))
        return RankWait(host[:_MOST_HOST], batches, share, _busiest(since, passed), len(blocks) - 1)


def _busiest(blocks: Mapping[int, Block], seconds: float) -> Stage:
    """Return the stage that was busy for the largest part of this time: the stages run side by side, and the busiest
    bounds them all.
    """
    main = blocks[-1].tolist()
    makers = [block for worker, block in blocks.items() if worker >= 0] or [blocks[-1]]
    making = np.sum(makers, axis=0).tolist()
    busy: dict[Stage, float] = {stage: stage_times(making, stage).total / len(makers) for stage in _MAKING}
    busy |= {stage: stage_times(main, stage).total for stage in _PASSING}
    busy["snapshot"] = max(busy["snapshot"], stage_times(main, "snapshot").total)
    transfer = stage_times(main, "transfer")
    # Many batches are on their way at a time, so the sum is no measure; only where each takes long it is the reason.
    if (
        transfer.number
        and transfer.total / transfer.number > _TRANSFER_S
        and transfer.total > _TRANSFER_SHARE * seconds
    ):
        busy["transfer"] = transfer.total
    return max(busy, key=lambda stage: busy[stage])


# ------------------------------------------------------------------------------------------------- between processes


def pack(wait: RankWait) -> str:
    """Return a rank's figures as JSON."""
    return json.dumps(wait._replace(share=round(wait.share, 4)))


def unpack(data: bytes) -> RankWait | None:
    """Return the figures that another rank has packed; None if these bytes are no such figures."""
    if not 0 < len(data) <= _MOST_BYTES:
        return None
    try:
        found = RankWait(*json.loads(data))
        right = len(found.host) <= _MOST_HOST and found.host.isprintable() and found.stage in _REASONS
        numbers = 0.0 <= found.share <= 1.0 and type(found.batches) is int and type(found.workers) is int
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return found if right and numbers else None


# --------------------------------------------------------------------------------------------------------- in words


def compare(waits: Mapping[int, RankWait]) -> Comparison:
    """Name the ranks that starve, and their reasons.

    Args:
        waits: figures by rank, of the ranks that are known.
    """
    if len(waits) < 2:
        return Comparison("", ())
    order = sorted(waits, key=lambda rank: (waits[rank].share, rank))
    first = next(
        (
            number
            for number, (one, next_one) in enumerate(pairwise(waits[rank].share for rank in order), 1)
            if next_one >= _FACTOR * one and next_one - one >= _GAP
        ),
        None,
    )
    if first is None:
        shares = [each.share for each in waits.values()]
        reasons = {_reason(each) for each in waits.values()}
        reason = f", for {reasons.pop()}" if len(reasons) == 1 and max(shares) >= _GAP else ""
        return Comparison(f"all {len(waits)} ranks wait alike, {_percent(shares)} of the time{reason}", ())
    starving, others = sorted(order[first:]), order[:first]
    groups: dict[str, list[int]] = {}
    for rank in starving:
        groups.setdefault(_reason(waits[rank]), []).append(rank)
    several_hosts = len({each.host for each in waits.values()}) > 1
    parts = []
    for reason, ranks in groups.items():
        where = _hosts([waits[rank].host for rank in ranks]) if several_hosts else ""
        verb = "waits" if len(ranks) == 1 else "wait"
        share = _percent([waits[rank].share for rank in ranks])
        parts.append(f"{_named(ranks)}{where} {verb} {share} of the time for {reason}")
    rest = "the other" if len(others) == 1 else "the others"
    parts.append(f"{rest} {_percent([waits[rank].share for rank in others])}")
    return Comparison("; ".join(parts), tuple((rank, waits[rank].stage) for rank in starving))


def _reason(wait: RankWait) -> str:
    return "reads in the training process" if wait.stage == "fetch" and not wait.workers else _REASONS[wait.stage]


def _percent(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return high if low == high else f"{low[:-1]} to {high}"


def _hosts(hosts: Sequence[str]) -> str:
    names = sorted(set(hosts))
    if len(names) == 1:
        return f", on {names[0]}," if len(hosts) == 1 else f", one host ({names[0]}),"
    listed = f" ({', '.join(names)})" if len(names) <= _MOST_HOSTS else ""
    return f", {len(names)} hosts{listed},"


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them by their ends. `ranks` is sorted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs[:_MOST_RUNS]:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if left := sum(map(len, runs[_MOST_RUNS:])):
        parts.append(f"{left} more")
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


assert set(_REASONS) <= set(STAGES)
