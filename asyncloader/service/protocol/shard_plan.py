"""The plan of an epoch over shards: a node makes it, and the loader assigns the shards to its workers. Pure.

Data path: loader -> PLAN -> node -> process: dataset.plan -> [shard_plan] -> PLANNED -> loader's assignment.

The loader never learns where the shards are stored or how they are read: a plan consists of numbers and of names. Each
worker lists the shards itself. Their *fingerprint* must equal that of the plan, or the ranges would be those of other
shards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from asyncloader.errors import StateError
from asyncloader.service.protocol.records import Count, Name, read_record

_MOST_WORKERS = 1 << 24
_MOST_BATCH = 1 << 24
_OTHER_SHARDS = (
    "this node finds other shards than those that the epoch was planned with: what is stored has changed, or the nodes "
    "see different things. Make a new loader, and see that all nodes are alike"
)


class Catalog(NamedTuple):
    """Identifies the shards of a plan.

    Attributes:
        workers: workers of each rank.
        ranks: number of ranks.
        fingerprint: of the shards, their sizes and cuts; of fixed streams: of the shards and their samples.
        batch: of fixed streams, whose order the workers compute: samples in a global batch; else 0.
    """

    workers: Count
    ranks: Count
    fingerprint: Name
    batch: Annotated[int, Meta(ge=0, le=_MOST_BATCH)] = 0


class PlanRequest(NamedTuple):
    """A loader's request for a plan. The first five fields are the arguments of `RemoteIterableDataset.plan`.

    Attributes:
        workers: workers of each rank.
        rank: the loader's rank.
        ranks: number of ranks.
        key: seed of the order; None: not shuffled.
        common: whether all ranks have the same key.
        known: the fingerprint of the shards whose names the loader has; empty: it has no names.
    """

    workers: Count
    rank: Count
    ranks: Count
    key: Count | None
    common: bool
    known: Name


class Plan(NamedTuple):
    """The plan of an epoch for one rank.

    Attributes:
        fingerprint: that of the `Catalog`.
        names: the shards' names; empty if the loader has them.
        assignments: in their order; each consists of ranges, in the fields of a `CatalogRange`.
        samples: samples of the epoch, if known; see `EpochShares`.
        left_out: as in `EpochShares`.
        error: the error that was raised instead of a plan, packed by the service's codec; empty: none was raised.
    """

    fingerprint: Name
    names: list[str]
    assignments: list[list[tuple[Count, Count, Count | None, bool]]]
    samples: Count | None
    left_out: Annotated[float, Meta(ge=0, le=1)]
    error: bytes = b""


async def make_plan(dataset: Any, request: PlanRequest) -> Plan:
    """Make a plan; of fixed streams, count their samples. Raises the dataset's errors."""
    if getattr(dataset, "streams", None) is not None:
        fixed = dataset.fixed_streams(0)
        await fixed.plan_streams(1)
        return Plan(fixed.described()["shards"], [], [], fixed.samples, 0.0)
    workers, rank, ranks, key, common, known = request
    found = await dataset.plan(workers, rank, ranks, key, common=common)
    fingerprint = await dataset.fingerprint(workers, ranks)
    assignments: Any = [[tuple(each) for each in assignment] for assignment in found.assignments]
    names = [] if fingerprint == known else list(dataset.shard_urls)  # there may be many, and they rarely change
    return Plan(fingerprint, names, assignments, found.shares.samples, found.shares.left_out)


def read_request(body: bytes) -> PlanRequest:
    """Read the body of a PLAN.

    Raises:
        ValueError: it cannot be read, or a number is out of range.
    """
    # Without a limit a request could make the node allocate lists for any number of workers.
    request = read_record(PlanRequest, body)
    if request.rank >= request.ranks:
        raise ValueError(f"a plan for rank {request.rank} of {request.ranks}")
    check_catalog(request)
    return request


def check_catalog(catalog: Catalog | PlanRequest) -> None:
    """Check the numbers of workers and ranks. Errors as `read_request`."""
    if not (catalog.workers >= 1 and catalog.ranks >= 1 and catalog.workers * catalog.ranks <= _MOST_WORKERS):
        raise ValueError(f"a plan for {catalog.ranks} ranks with {catalog.workers} workers")


def check_shards(dataset: Any, find: Callable[[], Awaitable[str]], catalog: Catalog) -> None:
    """Have a dataset check its shards when it is entered, before any of them is read.

    Entering it then raises StateError if the shards differ from the catalog, or the store's error.

    Args:
        dataset: read by one worker connection alone.
        find: finds the shards, and returns their fingerprint; of fixed streams it also plans them.
        catalog: of the loader's plan.
    """
    kind: Any = type(dataset)

    class Checked(kind):  # type: ignore[misc]
        async def __aenter__(self) -> Any:
            entered = await super().__aenter__()
            try:
                if await find() != catalog.fingerprint:
                    raise StateError(_OTHER_SHARDS)
            except BaseException:
                await self.__aexit__(None, None, None)
                raise
            return entered

    dataset.__class__ = Checked
