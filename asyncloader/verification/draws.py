"""Experiments that find the line whose random numbers no seed decides: at the import, or in worker threads.

Data path: job -> [draws: making, watching] -> the process that reports. In forks of the server, where nothing that an
experiment changes is left over.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncloader.plain_context import plain_context
from asyncloader.verification.causes import ExperimentFailed, in_fork, until
from asyncloader.verification.making import import_target
from asyncloader.verification.runs import Job, opened
from asyncloader.verification.sources import Sources
from asyncloader.verification.tokens import leaves
from asyncloader.verification.user_code import CodeLine, rank
from asyncloader.verification.watching import called_before, changes
from asyncloader.workers.fetch.seeding import generator_marks

_MOST_LINES = 10

Work = Callable[[AbstractContextManager[Any]], dict[str, str]]
"""Makes a batch, the part that may draw in the given context. Returns its tokens."""


def in_samples(make: Callable[[], Any], job: Job) -> dict[str, Any]:
    """Find the line that draws from the process's generators while a batch is made, and that the batch depends on.

    Args:
        make: the user's function.
        job: ``at``: the batch's number.
    """

    def work(watching: AbstractContextManager[Any]) -> dict[str, str]:
        batches = until(opened(make, job), job)
        with watching:
            return leaves(next(batches))

    return {"line": _decisive(work, job["seconds"])}


def at_import(target: str, job: Job, sources: Sources) -> dict[str, Any]:
    """Find the line that asked for entropy, or drew from the process's generators, while the user's modules were
    imported, and that a batch depends on: they are imported again.

    Args:
        target: see `import_target`.
        job: ``at``: the batch's number.
        sources: of this process.
    """
    _forget_modules()

    def imported(number: int = 0, thawed: Sequence[Any] = ()) -> Callable[[], Any]:
        sources.active, sources.thawed = True, {(name, CodeLine(*place)) for name, *place in thawed}
        _seed(number)
        return import_target(target)

    def work(watching: AbstractContextManager[Any], **differently: Any) -> dict[str, str]:
        with watching:
            make = imported(**differently)
        return leaves(next(until(opened(make, job), job)))

    def asked() -> list[Any]:
        imported()
        return [[name, *place] for name, place in sources.sites]

    seconds = job["seconds"]
    wanted = _batch(work, nullcontext(), seconds)
    if _batch(work, nullcontext(), seconds) != wanted:
        return {}
    for site in _lines(in_fork(asked, seconds)):
        if _batch(partial(work, thawed=[site]), nullcontext(), seconds) != wanted:
            return {"asked": site}
    if _batch(partial(work, number=1), nullcontext(), seconds) == wanted:
        return {}
    return {"line": _decisive(work, seconds)}


def _decisive(work: Work, seconds: float) -> CodeLine | None:
    """Return the first line that draws, and that the batch depends on: it is another one if the generators are seeded
    otherwise before that line runs.
    """

    def seen(least: int) -> list[Any]:
        found: list[CodeLine] = []
        work(_noting(found, least))
        return [list(each) for each in found]

    # Those of installed packages, if the user's code is not in between.
    found = _lines(in_fork(partial(seen, 2), seconds)) or _lines(in_fork(partial(seen, 1), seconds))
    lines = [CodeLine(*each) for each in found]

    def seeded(other: CodeLine | None) -> dict[str, str]:
        calls = {line: partial(_seed, int(line == other)) for line in lines}
        return _batch(work, called_before(calls), seconds)

    wanted = seeded(None)
    return next((line for line in lines if seeded(line) != wanted), None)


@plain_context
def _noting(found: list[CodeLine], least: int) -> Generator[None]:
    """Note the lines that draw from the process's generators, in files of at least this rank."""
    with changes(generator_marks, least) as lines:
        yield
    found += lines  # the last line is known only now


def _forget_modules() -> None:
    """Have the user's modules imported anew: those of Python, as compiled ones cannot be imported twice."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        # Made-up modules, as torch has some, have names of files that are nowhere.
        if Path(file).is_absolute() and file.endswith(".py") and rank(file) == 2:
            del sys.modules[name]
            package, _, own = name.rpartition(".")
            if package in sys.modules:  # as that of a folder without a file is: it has the module as attribute
                vars(sys.modules[package]).pop(own, None)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _batch(work: Work, watching: AbstractContextManager[Any], seconds: float) -> dict[str, str]:
    """Return a batch that is made in a fork.

    Raises:
        ExperimentFailed: it was not made in time, or at all.
    """
    found = in_fork(lambda: work(watching), seconds)
    if not isinstance(found, dict):
        raise ExperimentFailed("no batch came in time")
    return found


def _lines(found: Any) -> list[Any]:
    """Return the first lines that a fork has found; none if it took too long."""
    return found[:_MOST_LINES] if isinstance(found, list) else []
