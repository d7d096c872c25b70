"""A lane's part of a state that comes from outside: checked before a worker goes on from it. Pure.

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

from collections.abc import Callable, Sequence
from typing import Any

from asyncloader.errors import StateError

__all__ = ["check_lane", "is_count", "is_piece"]


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
