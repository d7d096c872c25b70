"""Finds out how many samples each shard of a dataset has, alone or together with the other ranks.

Data path: discovery -> [shared_counting: index_counts, sample_counts] -> fixed_streams.

Numbers come, in this order, from an MDS index or a Parquet footer, from the cache directory, from the index of
`write_shards`, and from reading the shard. All but the first are compared with the size and the version that the store
has now.

Several ranks share the work: rank 0 lists the shards, and the others get its list; each rank counts a part of them, and
gets the numbers of the others. Ranks that would read other shards, or in another order, get an error. Ranks that share
the shards without counting get rank 0's list alone, where it comes from a store.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncloader.bridge import in_thread
from asyncloader.errors import RanksDisagree
from asyncloader.ranks.agreement import Agreement
from asyncloader.ranks.exchange import RankExchange, difference, in_daemon
from asyncloader.remote.catalog import Shard, plain_list, read_list
from asyncloader.remote.index_counts import Promise, read_records
from asyncloader.remote.prefetch import Open
from asyncloader.remote.sample_counts import Counted, count_shards, hash_of, read_counts, write_counts
from asyncloader.remote.shard_sizes import RAISED_WHEN_READ, for_each, with_counts
from asyncloader.remote.stores import Stores
from asyncloader.transports import InvalidPath, SizeUnknown

_WITHOUT_INFO = (*RAISED_WHEN_READ, InvalidPath, SizeUnknown)  # the shard is read instead

_SHOWN = 300  # characters of a rank's shard in an error


class Counting(NamedTuple):
    """How the samples of a dataset are counted.

    Attributes:
        stores: find the transports.
        open: opens a shard.
        cache_dir: where numbers are kept; None: nowhere.
        urls: the dataset's, as given; its numbers are kept under this name.
        reading: further plain values on which the number of a shard's samples depends.
    """

    stores: Stores
    open: Open
    cache_dir: str | None
    urls: Sequence[str]
    reading: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name under which the numbers are kept."""
        return hash_of(*self.urls).hex()


class _CountedPart(NamedTuple):
    """The known counts of some shards, by their places; and the names under which they may be kept."""

    counted: dict[int, Counted]
    keys: dict[int, bytes]


async def count_samples(counting: Counting, shards: Sequence[Shard]) -> list[Counted]:
    """Return the count of each shard's samples, as far as known.

    Raises:
        TransportError: a shard cannot be counted, and the error is not about its samples.
    """
    unknown = [at for at, shard in enumerate(shards) if shard.samples is None]
    promises = (await read_records(shards, counting.stores)).promises
    kept = await _kept(counting)
    part = await _count(counting, shards, unknown, promises, kept)
    await _keep(counting, part, kept)
    return _joined(shards, part.counted, promises)


async def count_together(
    counting: Counting,
    find: Callable[[], Awaitable[Sequence[Shard]]],
    listed: Sequence[Shard] | None,
    counted: Sequence[Counted] | None,
    about: Mapping[str, Any],
    ranks: RankExchange,
) -> tuple[list[Shard], list[Counted]]:
    """Return the shards, and the count of the samples of each: the same on all ranks, each of which calls this.

    Args:
        counting: how this rank counts.
        find: lists the shards.
        listed: the shards, if this rank has listed them before.
        counted: the counts, if this rank has counted them before.
        about: plain values that must be the same on all ranks.
        ranks: the others. The caller holds `RankExchange.planning`.

    Raises:
        RanksDisagree: other shards, or other values of `about`, on another rank; or its error.
        The errors of `find`, and of `count_samples`.
    """
    about = {**about, "urls": list(counting.urls)}
    shards, promises, error = list(listed or ()), dict[int, Promise](), None
    if ranks.rank == 0:
        try:
            shards = list(await find())
            promises = (await read_records(shards, counting.stores)).promises
        except Exception as failed:
            error = failed
    await ranks.check(error)
    sent = {"about": about, "shards": shards, "promises": [(at, *each) for at, each in promises.items()]}
    mine = await in_thread(partial(_packed, sent)) if ranks.rank == 0 else b""
    data = await ranks.share(mine)
    part = _CountedPart({}, {})
    unknown: list[int] = []
    kept: dict[bytes, Counted] = {}
    try:
        if ranks.rank:
            theirs = await in_thread(partial(json.loads, data))
            if (differing := difference(theirs["about"], about, ranks.rank)) is not None:
                raise differing
            shards = _listing(read_list(theirs["shards"]), shards, ranks.rank)
            promises = {at: Promise(*each) for at, *each in theirs["promises"]}
        unknown = [at for at, shard in enumerate(shards) if shard.samples is None]
        kept = await _kept(counting)
        own = unknown[ranks.rank :: ranks.ranks]
        if counted is None or len(counted) != len(shards):
            part = await _count(counting, shards, own, promises, kept)
        else:
            part = _CountedPart({at: counted[at] for at in own}, {})
    except Exception as failed:
        error = failed
    await ranks.check(error)
    part = await _exchanged(part, unknown, ranks)
    await _keep(counting, part, kept)
    return shards, _joined(shards, part.counted, promises)


async def list_together(
    find: Callable[[], Awaitable[Sequence[Shard]]] | None, about: object, agreement: Agreement
) -> Sequence[Shard] | None:
    """Return rank 0's shards, for ranks that share them without counting; None: this rank lists for itself.

    Args:
        find: lists the shards; None: each rank does, because that asks no store that all ranks have.
        about: the arguments of the list. A rank of other arguments than rank 0's lists for itself: what it reads is
            compared with what the others read before the first step.
        agreement: with the other ranks, each of which calls this.

    Raises:
        RanksDisagree: rank 0 could not list them, or another rank left.
        The errors of `find`, on rank 0.
    """
    shards: Sequence[Shard] | None = None
    data, error = b"", None
    digest = hash_of(about).hex()
    if find is not None and agreement.is_first_rank:
        try:
            shards = await find()
            data = await in_thread(partial(_packed, {"about": digest, "shards": shards}))
        except Exception as failed:
            error = failed
    text = None if error is None else f"{type(error).__name__}: {error}"
    try:
        data = await in_daemon(partial(agreement.share_list, data, text))
    except RanksDisagree:
        if error is not None:
            raise error from None
        raise
    if shards is None and find is not None and data:
        try:
            theirs = await in_thread(partial(json.loads, data))
            shards = read_list(theirs["shards"]) if theirs["about"] == digest else None
        except (ValueError, TypeError, KeyError, RecursionError) as broken:
            raise RanksDisagree(f"the list of shards that rank 0 has sent is broken: {broken}") from None
    return shards


def _joined(shards: Sequence[Shard], counted: Mapping[int, Counted], promises: Mapping[int, Promise]) -> list[Counted]:
    found: list[Counted] = []
    for at, shard in enumerate(shards):
        each = counted[at] if shard.samples is None else Counted(shard.samples)
        promise = promises.get(at)
        # A number that was kept may be an earlier promise. Of a shard that was read, positions are known.
        indexed = each.marks is None and promise is not None and promise.samples == each.samples
        found.append(each._replace(indexed=True) if indexed else each)
    return found


# ------------------------------------------------------------------------------------------------- counting


async def _count(
    counting: Counting,
    shards: Sequence[Shard],
    places: Sequence[int],
    promises: Mapping[int, Promise],
    kept: Mapping[bytes, Counted],
) -> _CountedPart:
    """Find out the numbers of the shards at these places."""
    found: dict[int, Counted] = {}
    keys: dict[int, bytes] = {}
    with_footers = await with_counts([shards[at] for at in places], counting.stores, leave=RAISED_WHEN_READ)
    for at, shard in zip(places, with_footers, strict=True):
        if shard.samples is not None:
            found[at] = Counted(shard.samples)

    async def look(at: int) -> None:
        transport, path = counting.stores.find(shards[at].url)
        with suppress(*_WITHOUT_INFO):
            info = await transport.info(path)
            if counting.cache_dir is not None and info.etag is not None:
                keys[at] = key = hash_of(counting.stores.name(shards[at].url), *info, *counting.reading)
                if key in kept:
                    found[at] = kept[key]
                    return
            if (promise := promises.get(at)) is not None and promise.fits(info):
                found[at] = Counted(promise.samples)

    rest = [at for at in places if at not in found]
    if counting.cache_dir is not None or promises:
        await for_each(rest, look)
        rest = [at for at in rest if at not in found]
    await count_shards(
        [shards[at] for at in rest],
        counting.open,
        lambda number, each: found.__setitem__(rest[number], each),
    )
    return _CountedPart(found, keys)


async def _kept(counting: Counting) -> dict[bytes, Counted]:
    if counting.cache_dir is None:
        return {}
    return await in_thread(partial(read_counts, counting.cache_dir, counting.name))


async def _keep(counting: Counting, part: _CountedPart, kept: Mapping[bytes, Counted]) -> None:
    counts = {key: part.counted[at] for at, key in sorted(part.keys.items())}
    if counting.cache_dir is not None and counts.keys() - kept.keys():
        await in_thread(partial(write_counts, counting.cache_dir, counting.name, counts))


# ------------------------------------------------------------------------------------------------- the ranks


def _packed(sent: dict[str, Any]) -> bytes:
    """Return the values that rank 0 sends to the others, its list of shards among them."""
    return json.dumps(sent | {"shards": plain_list(sent["shards"])}).encode()


def _listing(theirs: Sequence[Shard], mine: Sequence[Shard], rank: int) -> list[Shard]:
    """Return the shards that rank 0 has listed.

    Raises:
        RanksDisagree: this rank has listed others.
    """
    if not mine:
        return list(theirs)
    for at in range(max(len(theirs), len(mine))):
        here = (mine[at].url, mine[at].samples) if at < len(mine) else None
        there = (theirs[at].url, theirs[at].samples) if at < len(theirs) else None
        if here != there:
            raise RanksDisagree(
                f"rank {rank} lists {len(mine)} shards and rank 0 lists {len(theirs)}; the first that differ, with the "
                f"samples in their index, are {here!r:.{_SHOWN}} and {there!r:.{_SHOWN}}: let all ranks see the same "
                "store"
            )
    return list(mine)


async def _exchanged(part: _CountedPart, places: Sequence[int], ranks: RankExchange) -> _CountedPart:
    """Return what all ranks know of the shards at these places, each of which one rank has counted."""
    count = len(places)
    table = np.zeros((count, 4), np.int64)  # samples, marks, and two halves of the key
    own = [(number, at) for number, at in enumerate(places) if at in part.counted]
    for number, at in own:
        marks = part.counted[at].marks
        table[number, :2] = part.counted[at].samples, 0 if marks is None else marks.shape[1]
        if at in part.keys:
            table[number, 2:] = np.frombuffer(part.keys[at], np.int64)
    table = (await ranks.total(table.ravel())).reshape(count, 4)
    ends = 2 * np.cumsum(table[:, 1])
    numbers = np.zeros(int(ends[-1]) if count else 0, np.int64)
    for number, at in own:
        marks = part.counted[at].marks
        if marks is not None:
            numbers[ends[number] - marks.size : ends[number]] = marks.ravel()
    numbers = await ranks.total(numbers)
    found = _CountedPart({}, {})
    for number, at in enumerate(places):
        samples, size = table[number, :2].tolist()
        marks = numbers[ends[number] - 2 * size : ends[number]].reshape(2, size) if size else None
        found.counted[at] = Counted(samples, marks)
        if table[number, 2:].any():
            found.keys[at] = table[number, 2:].tobytes()
    return found
