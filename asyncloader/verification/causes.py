"""Experiments that find why batches differ: values that are kept between samples, entropy, handles, parts of a set-up.

Data path: job -> [causes: making, watching] -> the process that reports. In a process of its own; experiments that
would disturb each other run in forks of it.
"""

from __future__ import annotations

import base64
import faulthandler
import functools
import importlib
import json
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch

from asyncloader.errors import text_of
from asyncloader.verification.objects import (
    Kept,
    SharedHandle,
    copied,
    handles,
    kept,
    parts,
    snapshot,
    unpicklable,
)
from asyncloader.verification.runs import Job, opened, read_before
from asyncloader.verification.sources import Sources
from asyncloader.verification.tokens import leaves, state_of_generator, token
from asyncloader.verification.user_code import CodeLine, definition_of, rank
from asyncloader.verification.watching import changes, record, uses

_MOST_CANDIDATES = 12


class ExperimentFailed(RuntimeError):
    """User code, or the experiment, raised in a fork."""


def in_fork(experiment: Callable[[], Any], seconds: float) -> Any:
    """Run an experiment in a fork of this process, and return its result; a text with its stacks if it takes longer.

    Raises:
        ExperimentFailed: it raised, or the fork died.
    """
    # No pipe: a process that user code has started may hold its end open.
    with tempfile.TemporaryFile() as stacks, tempfile.TemporaryFile() as results:
        pid = os.fork()
        if not pid:
            try:
                me = os.getpid()
                faulthandler.dump_traceback_later(seconds, exit=True, file=stacks.fileno())
                try:
                    result = {"value": experiment()}
                except BaseException as error:  # the fork must not go on as its parent does
                    result = {"error": f"{type(error).__name__}: {text_of(error)}"}
                faulthandler.cancel_dump_traceback_later()
                if os.getpid() == me:  # else a fork that user code has made came back, too
                    results.write(json.dumps(result).encode())
                    results.flush()
            finally:
                os._exit(0)
        with suppress(ChildProcessError):  # user code ignores SIGCHLD, so that the system has taken the status
            os.waitpid(pid, 0)
        results.seek(0)
        text = results.read()
        if text:
            result = json.loads(text)
            if "error" in result:
                raise ExperimentFailed(result["error"])
            return result["value"]
        stacks.seek(0)
        found = stacks.read(100_000).decode(errors="replace")
        if not found:
            raise ExperimentFailed("the process of the experiment died")
        return found


# -------------------------------------------------------------------------------- values that are kept


def state(make: Callable[[], Any], job: Job) -> dict[str, Any]:
    """Find the kept value on which a batch depends, and the line that changes it.

    Args:
        make: the user's function.
        job: ``at``: the batch's number; ``passes``: 2 if it differs when an epoch was read before, as ``kind`` says.
    """
    seconds = job["seconds"]
    before, after = in_fork(lambda: _snapshots(make, job), seconds)
    paths = sorted((path for path in after if before.get(path) != after[path]), key=len)
    wanted = in_fork(lambda: _batch(make, job, None), seconds)

    def matters(path: str) -> bool:
        try:
            got = in_fork(lambda: _batch(make, job, path), seconds)
        except ExperimentFailed:  # the value cannot be copied, or nothing works without it
            return False
        return isinstance(got, dict) and got != wanted

    found = next(filter(matters, paths[:_MOST_CANDIDATES]), None)
    lines: Any = []
    if found is not None:
        inner = [path for path in paths if path.startswith((f"{found}.", f"{found}["))]
        found = next(filter(matters, inner[: -_MOST_CANDIDATES - 1 : -1]), found)
        lines = in_fork(lambda: _writers(make, job, found), seconds)
    return {"path": found, "lines": lines if isinstance(lines, list) else [], "changed": paths[:20]}


def _snapshots(make: Callable[[], Any], job: Job) -> list[dict[str, str]]:
    loader = opened(make, job)
    roots = parts(loader)
    before = snapshot(roots)
    batches = until(loader, job)
    after = snapshot(roots)
    del batches
    return [before, after]


def _batch(make: Callable[[], Any], job: Job, path: str | None) -> dict[str, str]:
    """Return the batch; with the value at the path put back to its beginning just before."""
    loader = opened(make, job)
    held = None if path is None else _at(loader, path)
    saved = None if held is None else copied(held.get())
    batches = until(loader, job)
    if held is not None:
        _restore(held, saved)
    return leaves(next(batches))


def _writers(make: Callable[[], Any], job: Job, path: str) -> list[Any]:
    loader = opened(make, job)
    held = _at(loader, path)
    if held is None:
        return []
    with changes(lambda: token(held.get(), 3)) as lines:
        next(until(loader, job), None)
    return [list(each) for each in lines[:5]]


def _at(loader: Any, path: str) -> Kept | None:
    return next((each for each in kept(parts(loader)) if each.path == path), None)


def until(loader: Any, job: Job) -> Iterator[Any]:
    """Return an iterator that stands before the job's batch."""
    if job.get("passes") == 2:
        for _ in read_before(loader, job["kind"], job["batches"]):
            pass
    batches: Iterator[Any] = iter(loader)
    for _ in range(job["at"]):
        next(batches)
    return batches


def _restore(held: Kept, saved: Any) -> None:
    """Put a value back in place, so that every holder of the object sees it."""
    value = held.get()
    if isinstance(value, torch.Tensor) and value.shape == getattr(saved, "shape", None):
        value.detach().copy_(saved)
    elif isinstance(value, np.ndarray) and value.flags.writeable and value.shape == np.shape(saved):
        value[...] = saved
    elif isinstance(value, list):
        value[:] = saved
    elif isinstance(value, dict | set):
        value.clear()
        value.update(saved)
    elif isinstance(value, functools._lru_cache_wrapper):
        value.cache_clear()
    elif isinstance(value, random.Random):
        value.setstate(saved.getstate())
    elif isinstance(value, torch.Generator):
        value.set_state(saved.get_state())
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = saved.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        value.set_state(saved.get_state())
    else:
        held.set(saved)


def kept_values(make: Callable[[], Any], job: Job) -> dict[str, Any]:
    """Return the tokens of all kept values after ``at`` batches, from the beginning or from a state, and where the
    dataset's and the sampler's `state_dict` are defined.
    """
    loader = opened(make, job)
    if job.get("state") is not None:
        loader.load_state_dict(pickle.loads(base64.b64decode(job["state"])))
    batches = iter(loader)
    for _ in range(job["at"]):
        next(batches)
    roots = parts(loader)
    places = {}
    for name in ("dataset", "sampler", "batch_sampler"):
        method = getattr(type(roots.get(name)), "state_dict", None) or getattr(type(roots.get(name)), "__iter__", None)
        place = None if method is None else definition_of(method)
        if place is not None and rank(place.file):
            places[name] = list(place)
    return {"kept": snapshot(roots), "places": places}


def aliasing(make: Callable[[], Any], job: Job) -> list[Any]:
    """Return the lines that change a batch which was delivered before."""

    def experiment() -> list[Any]:
        loader = opened(make, job)
        batches = iter(loader)
        batch = None
        for _ in range(job["at"] + 1):
            batch = next(batches)
        with changes(lambda: token(batch, 6)) as lines:
            next(batches, None)
        return [list(each) for each in lines]

    found = in_fork(experiment, job["seconds"])
    return found if isinstance(found, list) else []


def length(make: Callable[[], Any], job: Job) -> list[Any]:
    """Return the lines that change the dataset's length."""

    def experiment() -> list[Any]:
        loader = opened(make, job)
        dataset: Any = loader.dataset
        with changes(lambda: len(dataset)) as lines:
            for _ in islice(loader, job["batches"]):
                pass
        return [list(each) for each in lines]

    found = in_fork(experiment, job["seconds"])
    return found if isinstance(found, list) else []


# ------------------------------------------------------------------------------------ entropy, and traces


def sites(make: Callable[[], Any], job: Job, sources: Sources) -> dict[str, Any]:
    """Return the lines that ask for entropy, and the batch; with all answers frozen but for those of ``thawed``
    and those at the import.

    Args:
        make: the user's function.
        job: ``thawed``: [name, file, line, function] of each; None: all answers are true.
        sources: of this process.
    """
    thawed = job.get("thawed")
    sources.thawed = None if thawed is None else {(each[0], CodeLine(*each[1:])) for each in thawed}
    sources.active = True
    with record() if job.get("trace") else _nothing() as events:
        loader = opened(make, job)
        batch = next(until(loader, job), None)
    sources.active = False
    found = [[name, *place] for name, place in sources.sites]
    imported = [[name, *place] for name, place in sources.imported[:50]]
    return {"sites": found[:50], "imported": imported, "leaves": leaves(batch), "events": events[:30_000]}


class _nothing:  # noqa: N801 - as `contextlib.nullcontext`
    def __enter__(self) -> list[Any]:
        return []

    def __exit__(self, *_: object) -> None: ...


# -------------------------------------------------------------------------- set-up: handles, pickles, seeds


def setup(make: Callable[[], Any], job: Job, sources: Sources) -> dict[str, Any]:
    """Look at the objects that the workers get: the part that does not pickle, handles that forked workers use, and
    whether `worker_init_fn` seeds all workers alike.
    """
    loader = opened(make, job)
    roots = parts(loader)
    refused = unpicklable(roots)
    found: dict[str, Any] = {"unpicklable": None, "handles": [], "seeds": None}
    if refused is not None:
        place = refused.place or sources.opened.get(id(refused.value))
        found["unpicklable"] = [refused.path, refused.what, refused.why, None if place is None else list(place)]
    where = definition_of(loader.worker_init_fn) if loader.worker_init_fn is not None else None
    found["init_place"] = None if where is None else list(where)
    there = handles(roots)
    if there:
        found["handles"] = _used(loader, there, job, sources)
    if loader.worker_init_fn is not None and "worker_init_fn" in roots:
        found["seeds"] = _equal_seeds(loader, job)
    return found


def _used(loader: Any, there: list[SharedHandle], job: Job, sources: Sources) -> list[Any]:
    """Return the handles that samples use in a forked process: path, kind, line, and where it was opened."""
    held = {id(each.value) for each in there if each.kind == "a lock" and _is_held(each.value)}
    if all(each.kind == "a lock" and id(each.value) not in held for each in there):
        return []
    before = {id(each.value): _offset(each.value) for each in there}

    def experiment() -> dict[str, Any]:
        with uses(each.value for each in there) as found:
            for _ in islice(loader, min(3, job["batches"])):
                pass
        return {str(key): list(place) for key, place in found.items()}

    used = in_fork(experiment, job["seconds"])
    result = []
    for each in there:
        opened_at = sources.opened.get(id(each.value))
        where = None if opened_at is None else list(opened_at)
        place = used.get(str(id(each.value))) if isinstance(used, dict) else None
        if each.kind == "a lock":
            if id(each.value) in held and isinstance(used, str):
                result.append([each.path, "a lock that another thread holds", used, where])
        elif each.kind == "an open file":
            if before[id(each.value)] != _offset(each.value):
                result.append([each.path, each.kind, place, where])
        elif place is not None:
            result.append([each.path, each.kind, place, where])
    return result


def _is_held(lock: Any) -> bool:
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def _offset(value: Any) -> int | None:
    """Return the position that all duplicates of a descriptor share, without the object's own buffer."""
    try:
        return os.lseek(value.fileno(), 0, os.SEEK_CUR)
    except (OSError, AttributeError, ValueError):
        return None


def _equal_seeds(loader: Any, job: Job) -> Any:
    """Return the generators that `worker_init_fn` leaves alike in all workers, with the lines that seed them."""

    def begun(worker: int) -> dict[str, Any]:
        seed = 1000 + worker
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        info: Any = importlib.import_module("torch.utils.data._utils.worker")
        info._worker_info = info.WorkerInfo(id=worker, num_workers=2, seed=seed, dataset=loader.dataset)
        with changes(_generators) as lines:
            loader.worker_init_fn(worker)
        return {"states": _generators(), "lines": [list(each) for each in lines]}

    one, other = (in_fork(lambda number=number: begun(number), job["seconds"]) for number in range(2))  # type: ignore[misc]
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    names = ("random", "numpy.random", "torch")
    same = [name for name, a, b in zip(names, one["states"], other["states"], strict=True) if a == b]
    where = definition_of(loader.worker_init_fn)
    return [same, one["lines"] or ([list(where)] if where else [])] if same else None


def _generators() -> list[str | None]:
    legacy: Any = np.random.mtrand._rand
    inst: Any = random._inst
    return [state_of_generator(each) for each in (inst, legacy, torch.default_generator)]
