"""Writes a list of shards as plain values for another rank, checks what a rank is sent, and digests a list. Pure.

Data path: discovery -> [shard_list] -> ranks.one_for_all, ranks.exchange -> [shard_list] -> dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from asyncloader.formats import ShardFormat
from asyncloader.formats.mds import mds_entry, parse_mds_entry
from asyncloader.remote.catalog import BUCKETS, PlainShards, Shard

_ANYWHERE = BUCKETS | {"hf"}  # schemes of URLs that name the same object on every host
_TOGETHER = 10_000  # shards whose names are digested at once
_COMPARED = 1000

_FORMATS = ("tar", "jsonl", "tfrecord", "mds", "parquet", "custom")


def plain_list(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the values of shards that were listed, in columns, as JSON has them."""
    if isinstance(shards, PlainShards):
        one: dict[str, Any] = {"urls": shards.urls, "formats": [shards.format], "format_of": None}
        return one | {"sizes": None, "stated": None, "mds": None}
    formats = {each: number for number, each in enumerate(dict.fromkeys(shard.format for shard in shards))}
    return {
        "urls": [shard.url for shard in shards],
        "formats": list(formats),
        "format_of": [formats[shard.format] for shard in shards] if len(formats) > 1 else None,
        "sizes": None if all(shard.size is None for shard in shards) else [shard.size for shard in shards],
        "stated": None if all(shard.stated is None for shard in shards) else [shard.stated for shard in shards],
        "mds": [None if shard.mds is None else mds_entry(shard.mds) for shard in shards]
        if any(shard.mds is not None for shard in shards)
        else None,
    }


def read_list(plain: Any) -> Sequence[Shard]:
    """Return the shards of `plain_list`.

    Raises:
        ValueError: it is no list of shards.
    """
    if type(plain) is not dict or not plain.keys() >= {"urls", "formats", "format_of", "sizes", "stated", "mds"}:
        raise ValueError("it is no list of shards")
    urls, sizes, stated, entries = plain["urls"], plain["sizes"], plain["stated"], plain["mds"]
    if type(urls) is not list or not urls or not all(type(url) is str and url for url in urls):
        raise ValueError("a URL is missing, or is no text")
    formats = [_format(each) for each in _column(plain["formats"], None)]
    if plain["format_of"] is None and len(formats) != 1:
        raise ValueError("the formats are missing")
    columns = plain["format_of"], sizes, stated, entries
    if columns == (None, None, None, None) and not any("?" in url for url in urls):
        return PlainShards(urls, formats[0])
    kinds = [0] * len(urls) if plain["format_of"] is None else _column(plain["format_of"], len(urls))
    if not all(type(kind) is int and 0 <= kind < len(formats) for kind in kinds):
        raise ValueError("the number of a format is out of range")
    sizes, stated, entries = (_column(each or [None] * len(urls), len(urls)) for each in (sizes, stated, entries))
    if not all(size is None or (type(size) is int and 0 <= size < 1 << 63) for size in [*sizes, *stated]):
        raise ValueError("a size is out of range")
    shards: list[Shard] = []
    for url, kind, size, said, entry in zip(urls, kinds, sizes, stated, entries, strict=True):
        mds = None if entry is None else parse_mds_entry(entry)
        shards.append(Shard(url, formats[kind], size, None if mds is None else mds.samples, mds, stated=said))
    return shards


def fingerprint_of(names: Sequence[str], shards: Sequence[Shard]) -> str:
    """Return a digest of the shards' names, sizes and cut points."""
    digest = hashlib.blake2b(digest_size=16)
    # The end of each text below, where nothing but the name is known.
    rest = repr(("", *shards[0][1:-1]))[3:] if isinstance(shards, PlainShards) else None
    for first in range(0, len(shards), _TOGETHER):
        some = names[first : first + _TOGETHER]
        if rest is not None:
            text = "".join([f"({name!r}{rest}" for name in some])
        else:
            pairs = zip(some, shards[first : first + _TOGETHER], strict=True)
            text = "".join([repr((name, *shard[1:-1])) for name, shard in pairs])  # without `stated`
        digest.update(text.encode(errors="surrogatepass"))
    return digest.hexdigest()


def list_in_words(names: Sequence[str]) -> str:
    """Return a text that tells a list of shards from another list.

    In an object store whole URLs count, and elsewhere the files' names: a rank may read a copy, or mount the folder at
    another place. Of a long list every n-th name counts, so that it takes no time.
    """
    files = file_names((*names[:: 1 + len(names) // _COMPARED], *names[-1:]))
    if not files:
        return "no shards"
    digest = hashlib.blake2b("\n".join(files).encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{len(names):,} shards from {files[0]!r:.160} to {files[-1]!r:.160} (digest {digest})"


def file_names(names: Sequence[str]) -> list[str]:
    """Return the names of shards on every host: whole URLs in an object store, and elsewhere the files' names."""
    return [name if name.partition("://")[0].lower() in _ANYWHERE else name.rpartition("/")[2] for name in names]


def _column(values: Any, length: int | None) -> list[Any]:
    if type(values) is not list or (length is not None and len(values) != length):
        raise ValueError("a column has another length")
    return values


def _format(plain: Any) -> ShardFormat:
    if type(plain) is not list or len(plain) != 2 or plain[0] not in _FORMATS or plain[1] not in (None, "gzip", "zstd"):
        raise ValueError("a format is not known")
    return ShardFormat(*plain)
