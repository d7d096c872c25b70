"""Compares runs, and says in words what differs: the batch, the field, the line that causes it, and the remedy.

Data path: results of runs, causes -> [verdict] -> findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from asyncloader.verification.causes import Draw
from asyncloader.verification.findings import Finding
from asyncloader.verification.runs import Batch
from asyncloader.verification.user_code import CodeLine, UserFailure, short

State = Literal["ok", "note", "problem"]
OWN_GENERATOR = "draw from asyncloader.sample_rng(), or in a blocking __getitem__ from random, numpy.random or torch"
_MOST_FIELDS = 4

# ------------------------------------------------------------------------------------------------------ comparison


def difference(expected: Sequence[Batch], got: Sequence[Batch], offset: int = 0) -> int | None:
    """Return the number of the first batch that differs; None if none does."""
    for number, (one, other) in enumerate(zip(expected[offset:], got, strict=False), offset):
        if one != other:
            return number
    return None


def fields_of(expected: Batch, got: Batch) -> str:
    """Return which fields of a batch differ."""
    paths = [path for path in expected if expected[path] != got.get(path)] or list(got.keys() - expected.keys())
    return ", ".join(paths[:_MOST_FIELDS]) + ", ..." * (len(paths) > _MOST_FIELDS)


# ----------------------------------------------------------------------------------------------------------- words


def at(name: str, state: State, line: CodeLine | None, text: str, advice: str, **figures: Any) -> Finding:
    """Return a finding about a line."""
    if line is not None:
        text, figures = f"{line} in {line.function}: {text}", {**figures, "file": short(line.file), "line": line.line}
    return Finding(name, state, text, advice, figures)


def broken(name: str, failure: UserFailure, doing: str) -> Finding:
    """A run that raised, hung or died."""
    # A disturbance may be slow. Of another run that has no result nothing was verified.
    state: State = "note" if failure.late and failure.line is None and name == "disturbed run" else "problem"
    figures = {"error": failure.error} if failure.error else {}
    return at(name, state, failure.line, f"{doing} {failure.text}", failure.advice, **figures)


def drawn(draws: Sequence[Draw], state: State, number: int, why: str) -> Finding:
    """A batch that differs because of draws from the generators of the process."""
    first, *more = draws
    text = f"draws from {first.generator}, {why}"
    if more:
        text += f". So do {', '.join(f'{each.line} ({each.generator})' for each in more[:5])}"
    advice = f"{OWN_GENERATOR}; elsewhere give the sampler or dataset a generator with a seed"
    return at("random numbers", state, first.line, text, advice, batch=number)


def differs(number: int, fields: str, seen: str, advice: str = "") -> Finding:
    """A batch that differs in another run."""
    text = f"batch {number} ({fields}) is another one {seen}"
    advice = advice or (
        "make a sample from its index alone: look for what this field takes from earlier samples (a counter, a cache, "
        f"an array that is edited in place, a generator in the dataset) or from the worker; {OWN_GENERATOR}"
    )
    return Finding("bytes", "problem", text, advice, {"batch": number, "fields": fields})


def goes_on(batches: int, seen: str) -> Finding:
    """An epoch with more batches than the undisturbed run had."""
    text = f"the epoch goes on behind its {batches} batches with {seen}"
    advice = "let the number of samples depend on the epoch alone, not on what was read before, the worker or the clock"
    return Finding("bytes", "problem", text, advice, {"batch": batches})


def unpicklable(given: tuple[str, CodeLine | None], *, needed: bool, method: str) -> Finding:
    """A part that spawned workers cannot get."""
    text, line = given
    if needed:
        why, advice = (
            f"{text}, but the loader's workers start by {method}",
            "define functions and classes at the top of ",
        )
        return at("pickling", "problem", line, why, f"{advice}a module, and open files at the first sample")
    advice = "from Python 3.14 on they are not the default"
    return at("pickling", "note", line, f"{text}: the loader needs forked workers", advice)


def handle(kind: str, line: CodeLine, *, forks: bool) -> Finding:
    """A handle that forked workers share."""
    text = f"uses {kind} that was opened before the workers start. Forked workers share it: "
    text += "each one's read moves the position of the others" if kind == "an open file" else "their traffic gets mixed"
    advice = "open it at the first sample in each worker (worker_resource() does)"
    return at("handles", "problem" if forks else "note", line, text, advice)


def not_resumed(at_batch: int, number: int, fields: str) -> Finding:
    """A state that does not bring the position back."""
    text = f"resumed after batch {at_batch}, batch {number} ({fields}) is another one"
    advice = "put all that later samples depend on into state_dict(), and take it back in load_state_dict()"
    return Finding("resume", "problem", text, advice, {"batch": number, "fields": fields})
