"""One epoch of an assigned dataset: its plan, its assigner, and their part of the loader's state.

Data path: dataset.plan -> [assignment_state] -> epoch.pipeline -> worker_stream. Created when an iterator starts,
before its workers.

This part of the state stands beside the cursors of the workers:

    key        seed of the epoch's orders
    plan       digest of the plan; None: the epoch was not planned yet
    done       number of assignments of the plan that were given out
    back       assignments to give out before the rest of the plan; each is a list of ranges
    returned   [[batch, number, worker], ranges] for ranges that workers gave back, with the order of their requests

A worker stream's own state (`WorkerStream.state_dict`) is checked before a worker resumes from it:

    batch      number of its last batch; -1: it has made none
    taken      assignments that it has started
    asked      the batch in which it requested the next assignment; None: it has not requested it
    dry        that request was answered without an assignment
    over       its stream has ended
    todo       ranges still to be read; the first begins at the position where reading continues
    carry      ranges of the samples with which the next batch begins
    blocks     the shuffle buffer: {number, aim, given, size, block, filling}, the last two are lists of ranges;
               None: no buffer

A range is ``[shard, start, stop, sync]``, the fields of `CatalogRange`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncloader.base.events import Cursor
from asyncloader.errors import StateError
from asyncloader.remote.assignment import AssignmentLog, Returned, ShardAssigner, StreamStart
from asyncloader.remote.shard_splitting import Assignment, CatalogRange, EpochPlan, is_catalog_range, is_count
from asyncloader.workers.fetch.seeding import derive, draw_seed
from asyncloader.workers.fetch.setup import EpochStart


def stream_key(key: int, rank: int, workers: int, worker: int) -> int:
    """Derive the seed of one worker's shuffle buffer from the epoch's `key`."""
    return derive(key, "lane", rank * workers + worker)


def saved_key(saved: Any) -> int:
    """Return the seed of the orders of a saved epoch.

    Raises:
        StateError: the state has no valid seed.
    """
    key: Any = saved.get("key") if isinstance(saved, dict) else None
    if not is_count(key):
        raise StateError(f"the state is broken: its part about shards lacks something: the key is {key!r:.200}")
    return key  # type: ignore[no-any-return]


class EpochAssignment:
    """The plan, the log and the assigner of one epoch.

    Args:
        names: of the shards, for the digest.
        plan: of this rank.
        starts: the position at which each worker begins.
        saved: this part of a saved state, which has a `saved_key`; None: the epoch begins.
        key: the seed of the epoch's orders, see `saved_key`.
        ordered: see `ShardAssigner`.
        shuffle: block size of the workers' shuffle buffers, for the digest.

    Raises:
        StateError: the state is broken, or belongs to other shards.
    """

    def __init__(
        self,
        names: Sequence[str],
        plan: EpochPlan,
        starts: Sequence[EpochStart],
        saved: Any,
        *,
        key: int,
        ordered: bool,
        shuffle: int = 0,
    ) -> None:
        self._key = key
        if saved is not None and saved.get("plan", 0) is None:
            saved = None  # it was saved before the epoch was planned
        if saved is None and any(start.cursor is not None or start.skip for start in starts):
            raise StateError("the state is broken: workers have read shards, but nothing says which are left")
        self.shares = plan.shares
        """How the ranks share the epoch."""
        self._digest = _digest(names, plan.assignments, shuffle)
        self._workers = len(starts)
        self._log = (
            AssignmentLog(plan.assignments) if saved is None else self._restore_log(saved, plan.assignments, len(names))
        )
        for start in starts:
            if start.cursor is not None and start.cursor.iterator is not None:
                check_stream_state(start.cursor.iterator, len(names))
        self._first = [_taken(start.cursor.iterator if start.cursor else None) for start in starts]
        self.assigner = ShardAssigner(self._log, [_stream_start(start) for start in starts], ordered=ordered)

    def _restore_log(self, saved: Any, plan: Sequence[Assignment], shards: int) -> AssignmentLog:
        try:
            digest, done = saved["plan"], saved["done"]
            back = [tuple(map(CatalogRange._make, assignment)) for assignment in saved["back"]]
            returned = [
                Returned(tuple(order), tuple(map(CatalogRange._make, assignment)))
                for order, assignment in saved["returned"]
            ]
            returned.sort(key=lambda each: each.order)
            assignments = back + [each.assignment for each in returned]
            # The state comes from a file: each number is checked before it is used as an index.
            right = (
                is_count(done)
                and done <= len(plan)
                and all(is_catalog_range(each, shards) for assignment in assignments for each in assignment)
                and all(len(each.order) == 3 and all(map(is_count, each.order)) for each in returned)
                and all(each.giver < self._workers for each in returned)
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
                f"the state is broken: {done} of {len(plan)} assignments were given, and {len(assignments)} came back"
            )
        return AssignmentLog(plan, done, back, returned)

    def state(self, cursors: list[dict[str, Any] | None], given: Sequence[int]) -> dict[str, Any]:
        """Return this part of the loader's state, for workers at these cursors. Any thread.

        Replaces the cursors of workers that must count as ended, because the ranges that they gave back belong to
        another worker now.
        """
        taken = [
            first if cursor is None else max(first, _taken(cursor["iterator"]))
            for first, cursor in zip(self._first, cursors, strict=True)
        ]
        ended = {worker for worker, cursor in enumerate(cursors) if cursor is not None and cursor["ended"]}
        state = self._log.state(taken, ended)
        for worker in state.over:
            samples = (cursors[worker] or {"samples": 0})["samples"]
            cursors[worker] = Cursor(given[worker], samples, True, None, None)._asdict()
        return {
            "key": self._key,
            "plan": self._digest,
            "done": state.done,
            "back": [[*map(list, assignment)] for assignment in state.back],
            "returned": [[list(order), [*map(list, assignment)]] for order, assignment in state.returned],
        }


def _taken(state: Any) -> int:
    return 0 if not isinstance(state, dict) else int(state.get("taken", 0))


def _stream_start(start: EpochStart) -> StreamStart:
    cursor = start.cursor
    if cursor is None:
        return StreamStart(0, start.skip, 0)
    if cursor.ended or not isinstance(cursor.iterator, dict):
        return StreamStart(over=cursor.ended)
    state = cursor.iterator
    made = int(state["batch"]) + 1
    asks = made if state["asked"] is None else int(state["asked"])
    return StreamStart(asks, made + start.skip, int(state["taken"]), bool(state["over"]))


def _digest(names: Sequence[str], plan: Sequence[Assignment], shuffle: int) -> str:
    digest = hashlib.blake2b(b"%d" % shuffle, digest_size=16)
    for name in names:
        digest.update(f"{name}\n".encode(errors="surrogatepass"))  # file names need not be valid UTF-8
    for assignment in plan:
        digest.update(repr([tuple(shard_range) for shard_range in assignment]).encode())
    return digest.hexdigest()


def check_stream_state(state: Any, shards: int) -> None:
    """Check a worker stream's state against a catalog with `shards` shards.

    Raises:
        StateError: the state is not valid; the text names the field.
    """

    def shard_ranges(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(is_catalog_range(each, shards) for each in value)

    def is_batch_number(value: Any) -> bool:
        return is_count(value) or (value == -1 and not isinstance(value, bool))

    _check(
        state,
        {
            "batch": is_batch_number,
            "taken": is_count,
            "asked": lambda value: value is None or is_count(value),
            "dry": _is_flag,
            "over": _is_flag,
            "todo": shard_ranges,
            "carry": shard_ranges,
            "blocks": lambda value: value is None or isinstance(value, dict),
        },
    )
    blocks = state["blocks"]
    if blocks is None:
        return
    fields: dict[str, Callable[[Any], bool]] = dict.fromkeys(("aim", "given", "size"), is_count)
    _check(blocks, fields | {"number": is_batch_number, "block": shard_ranges, "filling": shard_ranges})
    if blocks["given"] > blocks["size"]:
        raise StateError(
            f"the state is broken: {blocks['given']} of a block of {blocks['size']} samples were given out"
        )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _check(state: Any, fields: dict[str, Callable[[Any], bool]]) -> None:
    if not isinstance(state, dict):
        raise StateError(f"the state is broken: a worker's position in the shards is {type(state).__name__}")
    for name, right in fields.items():
        if name not in state:
            raise StateError(f"the state is broken: a worker's position in the shards lacks {name!r}")
        if not right(state[name]):
            raise StateError(f"the state is broken: a worker's position in the shards has {name}={state[name]!r:.200}")


def new_key(seed: int | None, generator: torch.Generator | None, epoch: int) -> int:
    """Choose the seed of the orders of an epoch that begins: from the seed, or drawn at random as torch draws a base
    seed.

    It is not derived from the base seed, which stays the same for all epochs with persistent workers.
    """
    if seed is not None:
        return derive(seed, "leases", epoch) >> 1  # a number in a state is below 2**63
    return draw_seed(generator)
