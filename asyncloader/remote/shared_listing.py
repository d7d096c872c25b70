"""Lists the shards of a dataset once for all ranks.

Data path: discovery, ranks.one_for_all -> [shared_listing] -> dataset. The first rank that needs the list makes it.

Each process asks by itself for what costs no request, such as patterns with braces; for local files, which may be
others on each host; and for a user's own transport, of which nothing says whether the others' is the same. Workers,
which get the list from their loader, ask for themselves, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import PlainShards, Shard
from asyncloader.remote.discovery import INDEX, find_shards, split_url
from asyncloader.remote.shard_list import plain_list, read_list
from asyncloader.remote.stores import Stores, scheme_of, strip_signature

_HERE = frozenset(("file", "memory"))


class SharedListing:
    """The list of one dataset's shards. A copy in another process lists anew."""

    def __init__(self) -> None:
        self._once: Any = None

    def __reduce__(self) -> Any:
        return type(self), ()

    async def find(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        stores: Stores,
        format: ShardFormat | str | None = None,
    ) -> Sequence[Shard]:
        """Return the shards. Arguments as of `find_shards`; the same in each call.

        Raises:
            RanksDisagree: the rank that lists them for all could not.
            The errors of `find_shards`.
        """
        list_here = partial(find_shards, urls, stores, format)
        if get_worker_info() is not None or not _asks_a_store(urls, stores):
            return await list_here()
        if self._once is None:
            from asyncloader.ranks.one_for_all import OneForAll  # imports torch.distributed's machinery

            about = (urls, format, sorted(stores.options.items()))
            self._once = OneForAll("shards/" + hashlib.blake2b(repr(about).encode(errors="surrogatepass")).hexdigest())
        found: Sequence[Shard] = await self._once.find(list_here, _pack, _read)
        return found


def names_of(shards: Sequence[Shard]) -> list[str]:
    """Return the URLs that identify the shards in a state, without signatures."""
    if isinstance(shards, PlainShards):
        return list(shards.urls)
    urls = (shard.url for shard in shards)
    return [strip_signature(url) if scheme_of(url) in ("http", "https") else url for url in urls]


def _asks_a_store(urls: str | os.PathLike[str] | Iterable[Any], stores: Stores) -> bool:
    """Return whether finding the shards sends requests to a store that is the same for all ranks."""
    given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    texts = [url for url in given if isinstance(url, str) and scheme_of(url) not in _HERE]
    return stores.transport is None and len(texts) == len(given) and any(map(_is_listed, texts))


def _is_listed(url: str) -> bool:
    address = split_url(url)[0]
    return address.endswith(("/", INDEX)) or "*" in address or scheme_of(url) == "hf"


def _pack(shards: Sequence[Shard]) -> bytes:
    return json.dumps(plain_list(shards)).encode()


def _read(data: bytes) -> Sequence[Shard]:
    try:
        return read_list(json.loads(data))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
