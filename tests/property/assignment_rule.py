"""The rule by which shards are assigned, in its simplest form: lists, no messages, no saved state.

All workers read until each waits for the reply to a request. Then the earliest request is answered: that of the
earliest batch, then of the worker with the fewest assignments, then of the lowest index.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from tests.property.assignment_cases import Case, plan_of

AHEAD = 12 << 20
"""When this number of bytes is left of an assignment, the next assignment is requested."""


class Step(NamedTuple):
    """A sample of an assignment; `left`: bytes of the assignment after it, as far as known."""

    sample: int
    left: int


class Given(NamedTuple):
    """An assignment, and its bytes, as far as known."""

    steps: list[Step]
    length: int


class Wish(NamedTuple):
    """A request. Requests are answered in ascending order. `left`: the samples of a batch that cannot be filled."""

    batch: int
    number: int
    worker: int
    left: tuple[int, ...] | None


Answer = Given | str | None


def expected(case: Case) -> list[list[int]]:
    """Return the batches of an epoch without shuffle buffer and bad samples, in the order of delivery."""
    supply = _assignments(case)
    made: list[list[list[int]]] = [[] for _ in range(case.workers)]
    streams = [_stream(case, worker, made[worker]) for worker in range(case.workers)]
    waiting = {worker: next(streams[worker]) for worker in range(case.workers)}
    while waiting:
        wish = min(waiting.values(), key=lambda each: each[:3])
        answer: Answer = None
        if supply:
            answer = supply.pop(0)
        elif wish.left is not None:
            answer = "last" if len(waiting) == 1 else "over"
            if wish.left and answer == "over":
                supply.append(_given_back(case, wish.left))
        try:
            waiting[wish.worker] = streams[wish.worker].send(answer)
        except StopIteration:
            del waiting[wish.worker]
    batches: list[list[int]] = []
    for turn in range(max(map(len, made))):
        batches += [worker[turn] for worker in made if len(worker) > turn]
    size = case.batch_size or 1
    return [batch for batch in batches if len(batch) == size or not case.drop_last]


def _assignments(case: Case) -> list[Given]:
    assignments: list[Given] = []
    first = 0
    for assignment in plan_of(case):
        steps: list[Step] = []
        behind = 0
        counts: list[tuple[int, bool]] = []
        for shard_range in assignment:
            whole = sum(case.shards[shard_range.shard]) * case.unit
            stop = whole if shard_range.stop is None else shard_range.stop
            counts.append(((stop - shard_range.start) // case.unit, case.sized or shard_range.stop is not None))
        last = first + sum(count for count, _ in counts)
        number = last
        for count, known in reversed(counts):
            for _ in range(count):
                number -= 1
                steps.append(Step(number, behind))
                behind += case.unit if known else 0
        assignments.append(Given(steps[::-1], behind))
        first = last
    return assignments


def _given_back(case: Case, samples: tuple[int, ...]) -> Given:
    count = len(samples)
    return Given([Step(n, (count - 1 - at) * case.unit) for at, n in enumerate(samples)], count * case.unit)


def _stream(case: Case, worker: int, made: list[list[int]]) -> Generator[Wish, Answer, None]:
    """Read until blocked, and yield the request whose answer is needed."""
    size = case.batch_size or 1
    todo: list[Step] = []
    taken, asked, dry = 0, 0, False
    wants = True  # it has asked, and has not needed the answer yet
    while True:
        batch: list[int] = []
        while len(batch) < size:
            if todo:
                sample, left = todo.pop(0)
                batch.append(sample)
                if not wants and not dry and left <= AHEAD:
                    wants, asked = True, len(made)
                continue
            if not wants and not dry:
                wants, asked = True, len(made)
            answer = yield Wish(len(made), taken, worker, tuple(batch)) if dry else Wish(asked, taken, worker, None)
            wants = False
            if isinstance(answer, str):
                if answer == "last" and batch:
                    made.append(batch)
                return
            if answer is None:
                dry = True
                continue
            todo, dry = answer.steps, False
            taken += 1
            if answer.length <= AHEAD:
                wants, asked = True, len(made)
        made.append(batch)
