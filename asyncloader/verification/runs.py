"""Reads one run's batches, disturbed or not, and returns their tokens.

Data path: job -> [runs: target -> loader -> tokens] -> the process that compares. In a process of its own.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children
from typing import Any, NamedTuple

from asyncloader.loader import DataLoader
from asyncloader.verification.disturbances import Kind, LoaderFacts
from asyncloader.verification.target import changed, facts, make_loader
from asyncloader.verification.tokens import fields, rows, token
from asyncloader.verification.user_code import UserFailure


class LookJob(NamedTuple):
    """Asks for the facts about the user's loader."""


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """Asks for the batches of a run. The attributes that `Disturbance` has, too, mean the same.

    Attributes:
        batches: how many are read at most.
        seconds: no batch is begun when so many have passed since the first.
        ambient: the seed of the process's generators, which no loader may depend on.
        state: where the run goes on, pickled; None: at the beginning.
        rank: of two; None: of one.
        rows: whether the samples are told apart.
    """

    batches: int
    seconds: float
    kind: Kind = "plain"
    workers: int = 0
    method: str | None = None
    at: int = 0
    ambient: int = 0
    state: bytes | None = None
    rank: int | None = None
    rows: bool = False


class Batch(NamedTuple):
    """The tokens of a batch: of its fields, by their paths, and of its samples (None: they cannot be told apart)."""

    fields: dict[str, str]
    rows: list[str] | None


@dataclass
class RunResult:
    """What a run has read.

    Attributes:
        batches: the batches.
        ended: whether the epoch ended behind them.
        state: that of a run which is resumed, behind its last batch; pickled.
        edited: the batch that changed after it was delivered.
        failure: why there are no more.
    """

    batches: list[Batch] = field(default_factory=list)
    ended: bool = False
    state: bytes | None = None
    edited: int | None = None
    failure: UserFailure | None = None


def look(make: Callable[[], Any]) -> LoaderFacts:
    """Return the facts about the user's loader, of which a loader that the runs read can be made."""
    loader = make_loader(make, 0)
    found = facts(loader)
    changed(loader, num_workers=0, workers=None).close()
    return found


def opened(make: Callable[[], Any], job: RunJob) -> DataLoader[Any]:
    """Return the loader of a run."""
    if job.rank is not None:
        os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": "2"}
    loader: Any = make_loader(make, job.ambient)
    # Of more workers than CPUs, which is the disturbance's doing; the module may make warnings errors.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    changes: dict[str, Any] = {"num_workers": job.workers, "workers": None}
    if job.workers and job.method == "threads":
        changes["workers"] = "threads"
    elif job.workers and job.method:
        changes["multiprocessing_context"] = job.method
    if job.rank is not None:
        changes |= {"rank": job.rank, "world_size": 2, "batch_size": loader.batch_size // 2}
    return changed(loader, **changes)


def run(make: Callable[[], Any], job: RunJob, note: Callable[[str], None]) -> RunResult:
    """Read the batches of a run.

    Args:
        make: the user's function.
        job: which run.
        note: gets in words how far the run is; it is read where the process is killed.
    """
    note("the loader was being made")
    result = RunResult()
    loader = opened(make, job)
    note("the first batch was being made")
    began: float | None = None
    try:
        if job.state is not None:
            loader.load_state_dict(pickle.loads(job.state))
        for number in _steps(loader, job, result):
            note(f"batch {number} was being made")
            now = time.monotonic()
            began = began or now  # with the first batch: a busy machine takes its time to start workers
            if now - began > job.seconds:
                break
    except Exception as error:
        result.failure = UserFailure.of(error)
    with suppress(Exception):
        loader.close()
    return result


def _steps(loader: DataLoader[Any], job: RunJob, result: RunResult) -> Iterator[int]:
    """Read the batches into the result. Yields the number of the next batch."""
    if job.kind in ("again", "break"):  # another epoch, or the beginning of the same, comes before
        loader.set_epoch(int(job.kind == "again"))
        for number, _ in enumerate(loader, 1):
            yield number
            if number >= (job.batches if job.kind == "again" else job.at):
                break
        loader.set_epoch(0)
    previous: tuple[Any, str] | None = None
    iterator = iter(loader)
    while len(result.batches) < job.batches:
        if job.kind == "resume" and len(result.batches) == job.at:
            result.state = pickle.dumps(loader.state_dict())
            return
        batch = next(iterator, _END)
        if batch is _END:
            result.ended = True
            return
        if previous is not None and result.edited is None and token(previous[0]) != previous[1]:
            result.edited = len(result.batches) - 1
        result.batches.append(Batch(fields(batch), rows(batch) if job.rows else None))
        if not loader.num_workers:
            previous = (batch, token(batch))
        if job.kind == "kill" and len(result.batches) == job.at:
            _kill_worker()
        yield len(result.batches)


_END = object()


def _kill_worker() -> None:
    for process in sorted(active_children(), key=lambda each: each.pid or 0):
        if process.pid is not None and process.name.startswith("asyncloader-worker-"):  # others are the user's
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            return
