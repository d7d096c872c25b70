"""One epoch of a dataset that is leased out: its plan, its book, and its part of the loader's state.

Data path: dataset -> [epoch_leases: plan, book] -> pipeline -> lanes. Made when an iterator starts, before its workers.

The part of the state, beside the cursors of the lanes: ``{"key": int, "plan": str, "done": int, "back": [[[shard,
start, stop, sync], ...], ...], "returned": [[[batch, number, lane], [[shard, start, stop, sync], ...]], ...]}``: what
chose the epoch's orders, a digest of the plan (None: there was none yet), how many of its leases were given, the leases
that come before the rest, and what lanes gave back, with the stamps of their requests.

A lane's part of a state that comes from outside: checked before a worker goes on from it. Pure.

Data path: state -> [lane_state] -> lanes. The layout is that of `Lane.state_dict`; a piece is ``[shard, start, stop,
sync]``:

    batch      number of its last batch; -1: none
    taken      leases that it has begun
    asked      the batch in which it asked for the next one, or None
    dry        there was none
    over       its stream has ended
    todo       pieces to be read; the first begins where reading goes on
    carry      pieces that the next batch begins with
    blocks     of the shuffle buffer: {number, aim, given, size, block, filling}, the last two being pieces; or None
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncloader.errors import StateError
from asyncloader.remote.assignment import LaneStart, Lease, LeaseBook, Ledger, Returned
from asyncloader.remote.catalog import Piece
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart

__all__ = [
    "EpochLeases",
    "check_lane",
    "is_count",
    "is_piece",
    "new_key",
    "saved_key",
    "stream_key",
]


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


def is_count(value: Any) -> bool:
    """Whether it is an integer of at least 0; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_piece(piece: Sequence[Any], shards: int) -> bool:
    """Whether these are the fields of a `Piece` of a catalogue of so many shards."""
    if not isinstance(piece, list | tuple) or len(piece) != 4:
        return False
    shard, start, stop, sync = piece
    return all(map(is_count, (shard, start, 0 if stop is None else stop))) and shard < shards and isinstance(sync, bool)


def check_lane(state: Any, shards: int) -> None:
    """Check a lane's state, of a catalogue of so many shards.

    Raises:
        StateError: it is none, with the field that is wrong.
    """

    def pieces(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(is_piece(each, shards) for each in value)

    def place(value: Any) -> bool:
        return is_count(value) or (value == -1 and not isinstance(value, bool))

    _check(
        state,
        {
            "batch": place,
            "taken": is_count,
            "asked": lambda value: value is None or is_count(value),
            "dry": _is_flag,
            "over": _is_flag,
            "todo": pieces,
            "carry": pieces,
            "blocks": lambda value: value is None or isinstance(value, dict),
        },
    )
    blocks = state["blocks"]
    if blocks is None:
        return
    fields: dict[str, Callable[[Any], bool]] = dict.fromkeys(("aim", "given", "size"), is_count)
    _check(blocks, fields | {"number": place, "block": pieces, "filling": pieces})
    if blocks["given"] > blocks["size"]:
        raise StateError(
            f"the state is broken: {blocks['given']} of a block of {blocks['size']} samples were given out"
        )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _check(state: Any, fields: dict[str, Callable[[Any], bool]]) -> None:
    if not isinstance(state, dict):
        raise StateError(f"the state is broken: a worker's place among the shards is {type(state).__name__}")
    for name, right in fields.items():
        if name not in state:
            raise StateError(f"the state is broken: a worker's place among the shards lacks {name!r}")
        if not right(state[name]):
            raise StateError(f"the state is broken: a worker's place among the shards has {name}={state[name]!r:.200}")


def new_key(seed: int | None, generator: torch.Generator | None, epoch: int) -> int:
    """Chooses the orders of an epoch that begins: by the seed, else drawn, as torch draws a base seed. Not drawn from
    that: persistent workers have the same one in all their epochs.
    """
    if seed is not None:
        return derive(seed, "leases", epoch) >> 1  # as large as a state's numbers may be
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
