"""Reads one run's batches, disturbed or not, and returns their tokens.

Data path: job -> [runs: making -> loader -> tokens] -> the process that compares. In a process of its own.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import active_children
from typing import Any

from asyncloader.errors import text_of
from asyncloader.loader import DataLoader
from asyncloader.verification.making import changed, facts, made
from asyncloader.verification.tokens import leaves, rows, token
from asyncloader.verification.user_code import place_of_error

Job = dict[str, Any]


def changes_of(job: Job, loader: Any) -> dict[str, Any]:
    """Return the loader's arguments for a job."""
    workers = job.get("workers", 0)
    found: dict[str, Any] = {"num_workers": workers}
    if workers and job.get("method") == "threads":
        found["workers"] = "threads"
    elif workers and job.get("method"):
        found |= {"multiprocessing_context": job["method"], "workers": None}
    elif not workers:
        found["workers"] = None
    if "rank" in job:
        found |= {"rank": job["rank"], "world_size": 2, "batch_size": loader.batch_size // 2}
    if job.get("without_init"):
        found["worker_init_fn"] = None
    return found


def opened(make: Callable[[], Any], job: Job) -> DataLoader[Any]:
    """Return the loader of a job."""
    loader = made(make, job.get("ambient", 0))
    # Of more workers than CPUs, which is the disturbance's doing; the module may make warnings errors.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    return changed(loader, **changes_of(job, loader))


def run(make: Callable[[], Any], job: Job, note: Callable[[str], None]) -> dict[str, Any]:
    """Carry out a job, and return its result: plain values.

    Args:
        make: the user's function.
        job: ``kind``, ``workers``, ``method``, ``at``, ``batches``, ``seconds``, ``ambient``, ``state``, ``rank``.
        note: gets in words how far the run is; it may be read after the process was killed.
    """
    if "rank" in job:
        os.environ |= {"RANK": str(job["rank"]), "LOCAL_RANK": str(job["rank"]), "WORLD_SIZE": "2"}
    note("the loader was being made")
    began: float | None = None
    result: dict[str, Any] = {"batches": [], "error": None}
    loader = opened(make, job)
    note("the first batch was being made")
    try:
        if job.get("state") is not None:
            loader.load_state_dict(pickle.loads(base64.b64decode(job["state"])))
        for step in _steps(loader, job, result):
            note(f"batch {step} was being made")
            now = time.monotonic()
            began = began or now  # with the first batch: a busy machine takes its time to start workers
            if now - began > job["seconds"]:
                break
    except Exception as error:
        result["error"] = described(error)
    with suppress(Exception):
        loader.close()
    return result


def _steps(loader: DataLoader[Any], job: Job, result: dict[str, Any]) -> Iterator[int]:
    """Read the batches into the result, as the job's kind says. Yields the number of the next batch."""
    most, kind, at = job["batches"], job.get("kind", "plain"), job.get("at", 0)
    batches: list[dict[str, Any]] = result["batches"]
    length = _length(loader)
    if kind in {"again", "break"}:
        yield from read_before(loader, kind, most if kind == "again" else at)
    previous: tuple[Any, str] | None = None
    iterator = iter(loader)
    while len(batches) < most:
        if job.get("until") is not None and len(batches) >= job["until"]:
            result["state"] = base64.b64encode(pickle.dumps(loader.state_dict())).decode()
            break
        batch = next(iterator, _END)
        if batch is _END:
            result["ended"] = True
            break
        if previous is not None and not loader.num_workers and token(previous[0], 6) != previous[1]:
            result.setdefault("alias", len(batches) - 1)
        entry: dict[str, Any] = {"leaves": leaves(batch)}
        if job.get("rows"):
            entry["rows"] = rows(batch)
        batches.append(entry)
        previous = (batch, token(batch, 6))
        if kind == "kill" and len(batches) == at:
            _kill_worker()
        yield len(batches)
    if length != (now := _length(loader)):
        result["lengths"] = [length, now]


def read_before(loader: DataLoader[Any], kind: str, most: int) -> Iterator[int]:
    """Read the batches that come before those of epoch 0: those of another epoch for "again", the first of the same for
    "break". Yields their number so far.
    """
    loader.set_epoch(1 if kind == "again" else 0)
    for number, _ in enumerate(loader, 1):
        yield number
        if number >= most:
            break
    loader.set_epoch(0)


_END = object()


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except Exception:
        return None


def _kill_worker() -> None:
    for process in sorted(active_children(), key=lambda each: each.pid or 0):
        if process.pid is not None and process.name.startswith("asyncloader-worker-"):  # others are the user's
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            return


def described(error: BaseException) -> dict[str, Any]:
    """Describe an error in plain values: its text, and the user's line. Whatever its class does, this succeeds."""
    place, notes = place_of_error(error), list[str]()
    with suppress(Exception):
        notes += [str(each) for each in error.__notes__]
    return {
        "type": type(error).__name__,
        "text": text_of(error)[-4000:],
        "notes": notes[:5],
        "place": None if place is None else list(place),
    }


def look(make: Callable[[], Any], job: Job) -> dict[str, Any]:
    """Return the facts about the loader that the user's function makes, and about the loader that the runs read."""
    loader = made(make, job.get("ambient", 0))
    found = facts(loader)
    changed(loader, num_workers=0, workers=None).close()
    return found
