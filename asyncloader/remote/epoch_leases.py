"""One epoch of a dataset that is leased out: its plan, its book, and its part of the loader's state.

Data path: dataset -> [epoch_leases: plan, book] -> pipeline -> lanes. Made when an iterator starts, before its workers.

The part of the state, beside the cursors of the lanes: ``{"key": int, "plan": str, "done": int, "back": [[[shard,
start, stop, sync], ...], ...], "returned": [[[batch, number, lane], [[shard, start, stop, sync], ...]], ...]}``: what
chose the epoch's orders, a digest of the plan (None: there was none yet), how many of its leases were given, the leases
that come before the rest, and what lanes gave back, with the stamps of their requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from asyncloader.errors import StateError
from asyncloader.remote.catalogue import Piece
from asyncloader.remote.lane_state import check_lane, is_count, is_piece
from asyncloader.remote.leases import LaneStart, Lease, LeaseBook, Ledger, Returned
from asyncloader.workers.cursor import Cursor
from asyncloader.workers.info import EpochStart
from asyncloader.workers.seeding import derive

__all__ = ["EpochLeases", "saved_key", "stream_key"]


def stream_key(key: int, rank: int, lanes: int, lane: int) -> int:
    """Chooses the orders of a lane's shuffle buffer. `key`: that of the epoch."""
    return derive(key, "lane", rank * lanes + lane)


def saved_key(saved: Any) -> int:
    """What chose the orders of an epoch that was saved.

    Raises:
        StateError: this part of the state is broken.
    """
    key: Any = saved.get("key") if isinstance(saved, dict) else None
    if not is_count(key):
        raise StateError(f"the state is broken: its part about shards lacks something: the key is {key!r:.200}")
    return key  # type: ignore[no-any-return]


class EpochLeases:
    """One epoch's leases.

    Args:
        names: of the shards, for the digest.
        plan: the leases, in their order.
        starts: what each lane begins with.
        saved: this part of a state that was saved, which has a `saved_key`; None: the epoch begins.
        key: chose the plan; see `saved_key`.
        ordered: see `LeaseBook`.
        shuffle: samples of a block of the lanes' shuffle buffers, for the digest.

    Raises:
        StateError: the state is broken, or that of other shards.
    """

    def __init__(
        self,
        names: Sequence[str],
        plan: Sequence[Lease],
        starts: Sequence[EpochStart],
        saved: Any,
        *,
        key: int,
        ordered: bool,
        shuffle: int = 0,
    ) -> None:
        self._key = key
        if saved is not None and saved.get("plan", 0) is None:
            saved = None  # it was saved before anything was planned
        if saved is None and any(start.cursor is not None or start.skip for start in starts):
            raise StateError("the state is broken: workers have read shards, but nothing says which are left")
        self._digest = _digest(names, plan, shuffle)
        self._lanes = len(starts)
        self._ledger = Ledger(plan) if saved is None else self._restored(saved, plan, len(names))
        for start in starts:
            if start.cursor is not None and start.cursor.iterator is not None:
                check_lane(start.cursor.iterator, len(names))
        self._first = [_taken(start.cursor.iterator if start.cursor else None) for start in starts]
        self.book = LeaseBook(self._ledger, [_lane_start(start) for start in starts], ordered=ordered)

    def _restored(self, saved: Any, plan: Sequence[Lease], shards: int) -> Ledger:
        try:
            digest, done = saved["plan"], saved["done"]
            back = [_lease(lease) for lease in saved["back"]]
            returned = [Returned(tuple(stamp), _lease(lease)) for stamp, lease in saved["returned"]]
            returned.sort(key=lambda each: each.stamp)
            leases = back + [each.lease for each in returned]
            right = (
                is_count(done)
                and done <= len(plan)
                and all(is_piece(each, shards) for lease in leases for each in lease)
                and all(len(each.stamp) == 3 and all(map(is_count, each.stamp)) for each in returned)
                and all(each.giver < self._lanes for each in returned)
            )
        except (TypeError, ValueError, KeyError) as error:
            raise StateError(f"the state is broken: its part about shards lacks something: {error}") from error
        if digest != self._digest:
            raise StateError(
                "the state was saved of other shards, or of shards that were cut or shuffled differently: use the same "
                "URLs, number of workers and of ranks, and shuffling, or begin anew without the state"
            )
        if not right:
            raise StateError(
                f"the state is broken: {done} of {len(plan)} leases were given, and {len(leases)} came back"
            )
        return Ledger(plan, done, back, returned)

    def state(self, cursors: list[dict[str, Any] | None], given: Sequence[int]) -> dict[str, Any]:
        """This part of the loader's state, for lanes at these places. Any thread.

        Marks the cursors of lanes that are over, because another lane has what they gave back.
        """
        taken = [
            first if cursor is None else max(first, _taken(cursor["iterator"]))
            for first, cursor in zip(self._first, cursors, strict=True)
        ]
        ended = {lane for lane, cursor in enumerate(cursors) if cursor is not None and cursor["ended"]}
        state = self._ledger.state(taken, ended)
        for lane in state.over:
            samples = (cursors[lane] or {"samples": 0})["samples"]
            cursors[lane] = Cursor(given[lane], samples, True, None, None)._asdict()
        return {
            "key": self._key,
            "plan": self._digest,
            "done": state.done,
            "back": [_plain(lease) for lease in state.back],
            "returned": [[list(stamp), _plain(lease)] for stamp, lease in state.returned],
        }


def _lease(plain: Any) -> Lease:
    return tuple(Piece(*piece) for piece in plain)


def _plain(lease: Lease) -> list[list[Any]]:
    return [list(piece) for piece in lease]


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


def _digest(names: Sequence[str], plan: Sequence[Lease], shuffle: int) -> str:
    digest = hashlib.blake2b(b"%d" % shuffle, digest_size=16)
    for name in names:
        digest.update(name.encode(errors="surrogatepass") + b"\n")  # files may have names that are no text
    for lease in plan:
        digest.update(repr([tuple(piece) for piece in lease]).encode())
    return digest.hexdigest()
