"""One epoch of a dataset that is leased out: its plan, its book, and its part of the loader's state.

Data path: dataset -> [epoch_leases: plan, book] -> pipeline -> lanes. Made when an iterator starts, before its workers.

The part of the state, beside the cursors of the lanes: ``{"plan": str, "done": int, "back": [[[shard, start, stop,
sync], ...], ...]}``: a digest of the plan, how many of its pieces were leased, and the leases that come before the
rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from asyncloader.errors import StateError
from asyncloader.remote.catalogue import Piece
from asyncloader.remote.leases import LaneStart, Lease, LeaseBook, Ledger
from asyncloader.workers.cursor import Cursor
from asyncloader.workers.info import EpochStart
from asyncloader.workers.seeding import derive

__all__ = ["EpochLeases", "stream_key"]


def stream_key(base_seed: int, rank: int, lanes: int, lane: int) -> int:
    """Chooses the orders of a lane's shuffle buffer."""
    return derive(base_seed, "lane", rank * lanes + lane)


class EpochLeases:
    """One epoch's leases.

    Args:
        names: of the shards, for the digest.
        plan: the pieces, in the order in which they are leased.
        starts: what each lane begins with.
        saved: this part of a state that was saved; None: the epoch begins.
        ordered: see `LeaseBook`.

    Raises:
        StateError: the state is broken, or that of other shards.
    """

    def __init__(
        self,
        names: Sequence[str],
        plan: Sequence[Piece],
        starts: Sequence[EpochStart],
        saved: Any,
        *,
        ordered: bool,
    ) -> None:
        self._digest = _digest(names, plan)
        done, back = (0, []) if saved is None else self._checked(saved, plan, len(names))
        self._ledger = Ledger(plan, done, back)
        self._first = [_taken(start.cursor.iterator if start.cursor else None) for start in starts]
        self.book = LeaseBook(self._ledger, [_lane_start(start) for start in starts], ordered=ordered)

    def _checked(self, saved: Any, plan: Sequence[Piece], shards: int) -> tuple[int, list[Lease]]:
        try:
            digest, done = saved["plan"], saved["done"]
            back = [tuple(Piece(*piece) for piece in lease) for lease in saved["back"]]
            right = 0 <= done <= len(plan) and all(_is_piece(piece, shards) for lease in back for piece in lease)
        except (TypeError, KeyError) as error:
            raise StateError(f"the state is broken: its part about shards lacks something: {error}") from error
        if digest != self._digest:
            raise StateError(
                "the state was saved of other shards, or of shards that were cut or shuffled differently: use the same "
                "URLs, number of workers and of ranks, and shuffling, or begin anew without the state"
            )
        if not right:
            raise StateError(
                f"the state is broken: {done} of {len(plan)} pieces were leased, and {len(back)} came back"
            )
        return done, back

    def state(self, cursors: list[dict[str, Any] | None], given: Sequence[int]) -> dict[str, Any]:
        """This part of the loader's state, for lanes at these places. Any thread.

        Marks the cursors of lanes that are over, because another lane has what they gave back.
        """
        taken = [
            first if cursor is None else max(first, _taken(cursor["iterator"]))
            for first, cursor in zip(self._first, cursors, strict=True)
        ]
        done, back, over = self._ledger.state(taken)
        for lane in over:
            samples = (cursors[lane] or {"samples": 0})["samples"]
            cursors[lane] = Cursor(given[lane], samples, True, None, None)._asdict()
        return {"plan": self._digest, "done": done, "back": [[list(piece) for piece in lease] for lease in back]}


def _taken(state: Any) -> int:
    return 0 if not isinstance(state, dict) else int(state.get("taken", 0))


def _lane_start(start: EpochStart) -> LaneStart:
    cursor = start.cursor
    if cursor is None:
        return LaneStart(0, start.skip, 0)
    if cursor.ended or not isinstance(cursor.iterator, dict):
        return LaneStart(over=cursor.ended)
    state = cursor.iterator
    made = int(state["batch"]) + 1
    asks = made if state["asked"] is None else int(state["asked"])
    return LaneStart(asks, made + start.skip, int(state["taken"]), bool(state["over"]))


def _is_piece(piece: Piece, shards: int) -> bool:
    shard, start, stop, sync = piece
    numbers = all(isinstance(each, int) and each >= 0 for each in (shard, start, 0 if stop is None else stop))
    return numbers and shard < shards and isinstance(sync, bool)


def _digest(names: Sequence[str], plan: Sequence[Piece]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(name.encode() + b"\n")
    for piece in plan:
        digest.update(repr(tuple(piece)).encode())
    return digest.hexdigest()
