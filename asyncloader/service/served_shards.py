"""Shards of a dataset that a service reads: the loader asks a node for an epoch's plan, and assigns it itself. Pure.

Data path: loader -> PLAN -> node -> process: dataset.plan -> [served_shards] -> PLANNED -> loader's assignment.

The loader never learns where the shards are stored or how they are read: a plan consists of numbers and of names. Each
lane finds the shards for itself; the *fingerprint* of what it found must be that of the plan, or its ranges would be
those of other shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncloader.errors import StateError
from asyncloader.service.values import pack, unpack

__all__ = [
    "Catalog",
    "Plan",
    "PlanRequest",
    "finding",
    "gathered",
    "messages",
    "planned",
    "read_catalog",
    "read_request",
]

_MOST_WORKERS = 1 << 24
_PIECE = 8192
"""Entries of a message, at most."""


class _Part:
    """What is in one of the messages."""

    NAMES, ASSIGNMENTS, END, ERROR = range(4)


class Catalog(NamedTuple):
    """Which shards a plan is about.

    Attributes:
        workers: of each rank.
        ranks: number of ranks.
        fingerprint: of the shards, their sizes and cuts.
    """

    workers: int
    ranks: int
    fingerprint: str


class PlanRequest(NamedTuple):
    """What a loader asks for. The first five are those of `RemoteIterableDataset.plan`.

    Attributes:
        workers: of each rank.
        rank: of the loader.
        ranks: number of ranks.
        key: seed of the order; None: none.
        common: whether all ranks have the same key.
        known: the fingerprint of the shards whose names the loader has; empty: of none.
    """

    workers: int
    rank: int
    ranks: int
    key: int | None
    common: bool
    known: str


class Plan(NamedTuple):
    """What this rank reads in an epoch.

    Attributes:
        fingerprint: see `Catalog`.
        names: of the shards; empty if the loader has them.
        assignments: in their order; each consists of ranges, in the fields of a `CatalogRange`.
    """

    fingerprint: str
    names: Sequence[str]
    assignments: Sequence[Sequence[Sequence[Any]]]


async def planned(dataset: Any, request: PlanRequest) -> Plan:
    """Make a plan. Raises what the dataset raises."""
    workers, rank, ranks, key, common, known = request
    found = await dataset.plan(workers, rank, ranks, key, common=common)
    fingerprint = await dataset.fingerprint(workers, ranks)
    assignments = [[tuple(each) for each in assignment] for assignment in found]
    return Plan(fingerprint, [] if fingerprint == known else dataset.shard_urls, assignments)


def read_request(body: bytes) -> PlanRequest:
    """Read a PLAN's body.

    Raises:
        ValueError: it is none.
    """
    values = unpack(body)
    if type(values) is not tuple or len(values) != len(PlanRequest._fields):
        raise ValueError("broken stream: a PLAN that cannot be read")
    request = PlanRequest(*values)
    workers, rank, ranks, key, _, known = request
    if not all(type(each) is int for each in (workers, rank, ranks)) or type(known) is not str:
        raise ValueError("broken stream: a PLAN that cannot be read")
    if not (workers >= 1 and 0 <= rank < ranks and workers * ranks <= _MOST_WORKERS):
        raise ValueError(f"a plan for rank {rank} of {ranks} with {workers} workers")
    if key is not None and (type(key) is not int or not 0 <= key < 1 << 64):
        raise ValueError("broken stream: a PLAN that cannot be read")
    return request._replace(common=bool(request.common))


def read_catalog(values: Any) -> Catalog | None:
    """Read the part of an OPENING. Errors as `read_request`."""
    if values is None:
        return None
    workers, ranks, fingerprint = values
    read_request(pack((workers, 0, ranks, None, True, fingerprint)))
    return Catalog(workers, ranks, fingerprint)


def messages(answer: Plan | bytes) -> Iterator[bytes]:
    """The bodies of the messages that a plan is sent in: pieces, however many shards there are, and the end. Or what
    was raised instead, in the service's dialect.
    """
    if isinstance(answer, bytes):
        yield pack((_Part.ERROR, answer))
        return
    for part, values in ((_Part.NAMES, answer.names), (_Part.ASSIGNMENTS, answer.assignments)):
        for first in range(0, len(values), _PIECE):
            yield pack((part, list(values[first : first + _PIECE])))
    yield pack((_Part.END, answer.fingerprint))


def gathered(receive: Callable[[], bytes]) -> Plan | bytes:
    """Put together what was sent in messages; each call of `receive` gives one.

    Raises:
        ValueError: they are neither a plan nor an error.
    """
    names: list[Any] = []
    assignments: list[Any] = []
    while True:
        match unpack(receive()):
            case (_Part.NAMES, [*more]) if all(type(each) is str for each in more):
                names += more
            case (_Part.ASSIGNMENTS, [*more]):
                assignments += more
            case (_Part.END, str(fingerprint)):
                return Plan(fingerprint, names, assignments)
            case (_Part.ERROR, bytes(error)):
                return error
            case _:
                raise ValueError("broken stream: a plan that cannot be read")


def finding(dataset: Any, catalog: Catalog, init: Callable[[int], Any] | None) -> Callable[[int], Any]:
    """Make a `worker_init_fn` that calls `init`, and finds the shards before anything is read.

    What it returns raises StateError if these are other shards, or what the store raises.
    """

    def begin(worker: int) -> Any:
        before = None if init is None else init(worker)

        async def find() -> None:
            if inspect.isawaitable(before):
                await before
            if await dataset.fingerprint(catalog.workers, catalog.ranks) != catalog.fingerprint:
                raise StateError(
                    "this node finds other shards than those that the epoch was planned with: what is stored has "
                    "changed, or the nodes see different things. Make a new loader, and see that all nodes are alike"
                )

        return find()

    return begin
