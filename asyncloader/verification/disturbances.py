"""Draws the disturbed runs of a loader from a seed. Pure.

Data path: facts about the loader, seed -> [disturbances] -> runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Kind = Literal["plain", "again", "break", "kill", "resume"]


class LoaderFacts(NamedTuple):
    """The facts about the user's loader.

    Attributes:
        name: its package and class.
        ours: whether it is one of asyncloader's.
        seeded: whether it has ``seed=``.
        iterable: whether the dataset is iterated: then the number of workers decides on the samples' order, and stays.
        workers: their number.
        threads: whether they are threads.
        method: how worker processes are started.
        asynchronous: whether samples are made concurrently, in coroutines.
        stateful: whether the dataset has a `state_dict`.
        sampler: whether it has a sampler of the user's, which may count its epochs.
    """

    name: str
    ours: bool
    seeded: bool
    iterable: bool
    workers: int
    threads: bool
    method: str
    asynchronous: bool
    stateful: bool
    sampler: bool


class Disturbance(NamedTuple):
    """A disturbed run.

    Attributes:
        kind: ``"plain"``: with other workers. ``"again"``: by a loader that has read another epoch. ``"break"``: left
            at a batch, and begun again. ``"kill"``: a worker is killed. ``"resume"``: goes on from a state in a new
            process.
        workers: the number of workers.
        method: how they are started; None: without workers.
        at: the batch at which it happens.
        then: the number of workers that goes on from a state.
    """

    kind: Kind
    workers: int
    method: str | None
    at: int = 0
    then: int = 0

    def __str__(self) -> str:
        some = f"{self.workers} worker{'s' * (self.workers != 1)}" + (f" ({self.method})" if self.method else "")
        match self.kind:
            case "plain":
                return some
            case "again":
                return f"another epoch read before, {some}"
            case "break":
                return f"left after batch {self.at} and begun again, {some}"
            case "kill":
                return f"a worker killed after batch {self.at}, {some}"
            case "resume":
                return f"resumed after batch {self.at}, {some}, then {self.then}"


def disturbances(
    facts: LoaderFacts, methods: Sequence[str], batches: int, seed: int, most: int = 16
) -> Iterator[Disturbance]:
    """Yield the runs: each kind first, then drawn ones.

    Args:
        facts: about the loader.
        methods: start methods that the loader can be run with.
        batches: those of the undisturbed run.
        seed: of the draws.
        most: the number of runs.
    """
    rng = random.Random(f"asyncloader verify {seed}")
    counts = [facts.workers] if facts.iterable else [1, 2, 3]
    if facts.iterable and facts.workers <= 1:
        counts = [0, 1]  # the same stream

    def drawn(kind: Kind, method: str | None = None, workers: int | None = None) -> Disturbance:
        at = rng.randrange(1, batches) if batches > 1 else 1
        number = rng.choice(counts) if workers is None else workers
        way = (method or rng.choice(methods)) if number else None
        then = number if facts.iterable else rng.choice([0, *counts])
        return Disturbance(kind, number, way, at, then)

    several = facts.workers if facts.iterable else 2
    first = [drawn("again", workers=facts.workers if facts.iterable else 0)]
    first += [drawn("plain", method, several) for method in methods[:1]]
    kinds: list[Kind] = ["break"]
    if batches > 1:
        kinds.append("resume")
    if not facts.iterable and "threads" not in methods:  # a stream goes on as from a state
        kinds.append("kill")
    first += [drawn(kind, methods[0]) for kind in kinds]
    first += [drawn("plain", method, several) for method in methods[1:]]
    yield from first[:most]
    for _ in range(most - len(first)):
        yield drawn(rng.choice(["plain", *kinds]), rng.choice([methods[0], methods[0], *methods]))
