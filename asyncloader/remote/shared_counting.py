"""Finds out how many samples each shard of a dataset has, and gives rank 0's shards and numbers to the other ranks.

Data path: discovery -> [shared_counting: index_counts, sample_counts] -> fixed_streams.

Numbers come, in this order, from an MDS index or a Parquet footer, from the cache directory, from the index of
`write_shards`, and from reading the shard. All but the first are compared with the size and the version that the store
has now.

Of several ranks, rank 0 lists the shards and counts their samples, and the others get its list and its numbers. Ranks
that would read other shards, or in another order, get an error. Ranks that share the shards without counting get rank
0's list alone, where it comes from a store.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from asyncloader.bridge import in_thread
from asyncloader.errors import RanksDisagree
from asyncloader.ranks.agreement import Agreement
from asyncloader.ranks.exchange import RankExchange, difference, in_daemon
from asyncloader.remote.catalog import Shard, plain_list, read_list
from asyncloader.remote.index_counts import read_records
from asyncloader.remote.prefetch import Open
from asyncloader.remote.sample_counts import Counted, count_shards, hash_of, read_counts, write_counts
from asyncloader.remote.shard_sizes import RAISED_WHEN_READ, for_each, with_counts
from asyncloader.remote.stores import Stores
from asyncloader.transports import InvalidPath, SizeUnknown

_WITHOUT_INFO = (*RAISED_WHEN_READ, InvalidPath, SizeUnknown)  # the shard is read instead


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


async def count_samples(counting: Counting, shards: Sequence[Shard]) -> list[Counted]:
    """Return the count of each shard's samples.

    Raises:
        TransportError: a shard cannot be counted, and the error is not about its samples.
    """
    stores, cache_dir, name = counting.stores, counting.cache_dir, hash_of(*counting.urls)
    promises = (await read_records(shards, stores)).promises
    kept = {} if cache_dir is None else await in_thread(partial(read_counts, cache_dir, name))
    with_footers = await with_counts(shards, stores, leave=RAISED_WHEN_READ)
    found = {at: Counted(shard.samples) for at, shard in enumerate(with_footers) if shard.samples is not None}
    keys: dict[int, str] = {}

    async def look(at: int) -> None:
        transport, path = stores.find(shards[at].url)
        promise = promises.get(at)
        with suppress(*_WITHOUT_INFO):
            info = await transport.info(path)
            if cache_dir is not None and info.etag is not None:
                keys[at] = hash_of(stores.name(shards[at].url), *info, *counting.reading)
            if (known := kept.get(keys.get(at, ""))) is not None:
                # It may be an earlier promise. Of a shard that was read, positions are known.
                indexed = not known.marks and promise is not None and promise.samples == known.samples
                found[at] = known._replace(indexed=indexed)
            elif promise is not None and promise.fits(info):
                found[at] = Counted(promise.samples, indexed=True)

    if cache_dir is not None or promises:
        await for_each([at for at in range(len(shards)) if at not in found], look)
    rest = [at for at in range(len(shards)) if at not in found]
    await count_shards(
        [shards[at] for at in rest], counting.open, lambda number, each: found.__setitem__(rest[number], each)
    )
    counts = {key: found[at] for at, key in sorted(keys.items())}
    if cache_dir is not None and counts.keys() - kept.keys():
        await in_thread(partial(write_counts, cache_dir, name, counts))
    return [found[at] for at in range(len(shards))]


async def count_together(
    count: Callable[[], Awaitable[tuple[Sequence[Shard], Sequence[Counted]]]],
    about: Mapping[str, Any],
    ranks: RankExchange,
) -> tuple[Sequence[Shard], Sequence[Counted]]:
    """Return rank 0's shards, and the count of the samples of each, on all ranks, each of which calls this.

    Args:
        count: lists the shards and counts their samples.
        about: plain values that must be the same on all ranks.
        ranks: the others. The caller holds `RankExchange.planning`.

    Raises:
        RanksDisagree: other values of `about` on another rank; or its error.
        The errors of `count`.
    """
    shards: Sequence[Shard] = ()
    counted: Sequence[Counted] = ()
    sent, error = b"", None
    try:
        if ranks.rank == 0:
            shards, counted = await count()
            sent = await in_thread(partial(_packed, about, shards, counted))
    except Exception as failed:
        error = failed
    await ranks.check(error)
    data = await ranks.share(sent)
    try:
        if ranks.rank:
            theirs = await in_thread(partial(json.loads, data))
            if (differing := difference(theirs["about"], about, ranks.rank)) is not None:
                raise differing
            shards, counted = read_list(theirs["shards"]), [*map(Counted.of, theirs["counted"])]
    except Exception as failed:
        error = failed
    await ranks.check(error)
    return shards, counted


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
    digest = hash_of(about)
    if find is not None and agreement.is_first_rank:
        try:
            shards = await find()
            data = await in_thread(partial(_packed, digest, shards))
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


def _packed(about: Any, shards: Sequence[Shard], counted: Sequence[Counted] = ()) -> bytes:
    """Return the values that rank 0 sends to the others."""
    return json.dumps({"about": about, "shards": plain_list(shards), "counted": counted}).encode()
