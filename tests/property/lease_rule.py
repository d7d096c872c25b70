"""The rule by which shards are leased, in its plainest form: lists, no messages, nothing that is saved.

All lanes read as far as they can, until each has asked for a lease and waits for it. Then the earliest request is
answered: of the earliest batch of its lane, then that of the lane with the fewest leases, then of the first lane.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from tests.property.lease_world import Case, plan_of

__all__ = ["expected"]

AHEAD = 4 << 20
"""Bytes before a lease's end at which the next one is asked for."""


class Wish(NamedTuple):
    """A request; they are answered in their order. `left`: the samples of a batch that cannot be filled."""

    batch: int
    number: int
    lane: int
    left: tuple[int, ...] | None


def expected(case: Case) -> list[list[int]]:
    """The batches of an epoch without shuffle buffer and bad samples, in the order of delivery."""
    unit, last_places = case.unit, []
    pieces: list[list[int]] = []
    places: dict[int, int] = {}  # sample -> bytes to the end of its piece, from behind it
    first = 0
    for piece in plan_of(case):
        size = sum(case.shards[piece.shard]) * unit
        stop = size if piece.stop is None else piece.stop
        count = (stop - piece.start) // unit
        known = case.sized or piece.stop is not None
        for place in range(count):
            places[first + place] = (count - 1 - place) * unit if known else 0
        pieces.append(list(range(first, first + count)))
        last_places.append(count * unit if known else 0)
        first += count
    supply: list[list[int]] = pieces[:]
    made: list[list[list[int]]] = [[] for _ in range(case.workers)]
    lanes = [_lane(case, lane, made[lane], places, last_places, pieces) for lane in range(case.workers)]
    waiting = {lane: next(lanes[lane]) for lane in range(case.workers)}
    while waiting:
        wish = min(waiting.values(), key=lambda each: each[:3])
        answer: list[int] | str | None = None
        if supply:
            answer = supply.pop(0)
        elif wish.left is not None:
            last = len(waiting) == 1
            answer = "last" if last else "over"
            if wish.left and not last:
                supply.append(list(wish.left))
        try:
            waiting[wish.lane] = lanes[wish.lane].send(answer)
        except StopIteration:
            del waiting[wish.lane]
    batches: list[list[int]] = []
    for turn in range(max(map(len, made))):
        batches += [lane[turn] for lane in made if len(lane) > turn]
    size = case.batch_size or 1
    return [batch for batch in batches if len(batch) == size or not case.drop_last]


def _lane(
    case: Case,
    lane: int,
    made: list[list[int]],
    places: dict[int, int],
    lengths: list[int],
    pieces: list[list[int]],
) -> Generator[Wish, list[int] | str | None, None]:
    """Reads until it must wait for the answer to its request, which it gives then."""
    size = case.batch_size or 1
    todo: list[int] = []
    taken, asked, dry = 0, 0, False
    wants = True  # it has asked, and the answer was not needed yet
    while True:
        batch: list[int] = []
        while len(batch) < size:
            if todo:
                batch.append(todo.pop(0))
                if not wants and not dry and (not todo or places[batch[-1]] <= AHEAD):
                    wants, asked = True, len(made)
                continue
            if dry:
                answer = yield Wish(len(made), taken, lane, tuple(batch))
            else:
                answer = yield Wish(asked, taken, lane, None)
            wants = False
            if isinstance(answer, str):
                if answer == "last" and batch:
                    made.append(batch)
                return
            if answer is None:
                dry = True
                continue
            todo, dry = list(answer), False
            taken += 1
            length = next((lengths[n] for n, piece in enumerate(pieces) if piece == todo and todo), 0)
            if length <= AHEAD:
                wants, asked = True, len(made)
        made.append(batch)
