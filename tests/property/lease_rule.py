"""The rule by which shards are leased, in its plainest form: lists, no messages, nothing that is saved.

All lanes read as far as they can, until each has asked for a lease and waits for it. Then the earliest request is
answered: of the earliest batch of its lane, then that of the lane with the fewest leases, then of the first lane.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from tests.property.lease_cases import Case, plan_of

__all__ = ["expected"]

AHEAD = 12 << 20
"""Bytes before a lease's end at which the next one is asked for."""


class Step(NamedTuple):
    """A sample of a lease; `left`: bytes of the lease behind it, as far as they are known."""

    sample: int
    left: int


class Given(NamedTuple):
    """A lease, and its bytes, as far as they are known."""

    steps: list[Step]
    length: int


class Wish(NamedTuple):
    """A request; they are answered in their order. `left`: the samples of a batch that cannot be filled."""

    batch: int
    number: int
    lane: int
    left: tuple[int, ...] | None


Answer = Given | str | None


def expected(case: Case) -> list[list[int]]:
    """The batches of an epoch without shuffle buffer and bad samples, in the order of delivery."""
    supply = _leases(case)
    made: list[list[list[int]]] = [[] for _ in range(case.workers)]
    lanes = [_lane(case, lane, made[lane]) for lane in range(case.workers)]
    waiting = {lane: next(lanes[lane]) for lane in range(case.workers)}
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
            waiting[wish.lane] = lanes[wish.lane].send(answer)
        except StopIteration:
            del waiting[wish.lane]
    batches: list[list[int]] = []
    for turn in range(max(map(len, made))):
        batches += [lane[turn] for lane in made if len(lane) > turn]
    size = case.batch_size or 1
    return [batch for batch in batches if len(batch) == size or not case.drop_last]


def _leases(case: Case) -> list[Given]:
    leases: list[Given] = []
    first = 0
    for lease in plan_of(case):
        steps: list[Step] = []
        behind = 0
        counts: list[tuple[int, bool]] = []
        for piece in lease:
            whole = sum(case.shards[piece.shard]) * case.unit
            stop = whole if piece.stop is None else piece.stop
            counts.append(((stop - piece.start) // case.unit, case.sized or piece.stop is not None))
        last = first + sum(count for count, _ in counts)
        number = last
        for count, known in reversed(counts):
            for _ in range(count):
                number -= 1
                steps.append(Step(number, behind))
                behind += case.unit if known else 0
        leases.append(Given(steps[::-1], behind))
        first = last
    return leases


def _given_back(case: Case, samples: tuple[int, ...]) -> Given:
    count = len(samples)
    return Given([Step(n, (count - 1 - at) * case.unit) for at, n in enumerate(samples)], count * case.unit)


def _lane(case: Case, lane: int, made: list[list[int]]) -> Generator[Wish, Answer, None]:
    """Reads until it must wait for the answer to its request, which it gives then."""
    size = case.batch_size or 1
    todo: list[Step] = []
    taken, asked, dry = 0, 0, False
    wants = True  # it has asked, and the answer was not needed yet
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
            answer = yield Wish(len(made), taken, lane, tuple(batch)) if dry else Wish(asked, taken, lane, None)
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
