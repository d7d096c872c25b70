"""Describes shards: where they are, and how they are read. Pure.

Data path: discovery, shard_sizes -> [catalog] -> shard_splitting -> assignment -> worker_stream.
Data path: discovery -> [catalog: plain_list] -> ranks.agreement, ranks.exchange -> [read_list] -> dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from asyncloader.formats import MdsShard, ShardFormat, shard_format
from asyncloader.formats.base import base_name
from asyncloader.formats.mds import mds_entry, parse_mds_entry

PARQUET = ShardFormat("parquet", None)
"""Not read by a push parser: see `formats.parquet`."""

CUSTOM = ShardFormat("custom", None)
"""Read by a reader of the user's own."""

PARQUET_ENDINGS = (".parquet", ".pq")

BUCKETS = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
"""Schemes of object stores: ``scheme://bucket/key``."""


class Shard(NamedTuple):
    """One object that holds samples. Plain values, comparable and picklable.

    Attributes:
        url: full URL, or the path below a user's own transport; identifies the shard everywhere.
        format: how it is read.
        size: bytes of the object, if known.
        samples: number of samples, if an index has it.
        mds: the shard's entry in an MDS index.
        edges: offsets (MDS) or rows (Parquet) at which it can be cut, ascending, including its beginning and end. None:
            unknown, or not needed (JSON lines are cut by size), or the shard cannot be cut.
        stated: bytes that a listing says the object has, or had when `write_shards` wrote its index; an object of
            another size, or that has fewer, is an error when it is read. None: neither says.
    """

    url: str
    format: ShardFormat
    size: int | None = None
    samples: int | None = None
    mds: MdsShard | None = None
    edges: tuple[int, ...] | None = None
    stated: int | None = None


def named_format(format: ShardFormat | str | None) -> ShardFormat | None:
    """Return the format of a name, an extension without its dot: ``"tar"``, ``"jsonl.gz"``, ``"parquet"``.

    Raises:
        ValueError: no format has this name.
    """
    return format_of(f"shard.{format}") if isinstance(format, str) else format


def format_of(url: str) -> ShardFormat:
    """Return the format for the extension of `url`: Parquet, or a format of `formats.shard_format`.

    Raises:
        ValueError: no known extension.
    """
    if not url.lower().startswith(("http://", "https://")):
        # Unlike in web URLs, "?" and "#" may be part of a name: the extension at its very end is tried first.
        name = url.rpartition("/")[2]
        if name and name != base_name(url):
            with suppress(ValueError):
                return format_of(name)
    return PARQUET if base_name(url).lower().endswith(PARQUET_ENDINGS) else shard_format(url)


_ANYWHERE = BUCKETS | {"hf"}  # schemes of URLs that name the same object on every host
_COMPARED = 1000

_FORMATS = ("tar", "jsonl", "tfrecord", "mds", "parquet", "custom")


def plain_list(shards: Sequence[Shard]) -> list[Any]:
    """Return the values of shards that were listed, as JSON has them."""
    return [
        [shard.url, shard.format, shard.size, shard.stated, None if shard.mds is None else mds_entry(shard.mds)]
        for shard in shards
    ]


def read_list(plain: Any) -> list[Shard]:
    """Return the shards of `plain_list`.

    Raises:
        ValueError: it is no list of shards.
    """
    if type(plain) is not list or not plain:
        raise ValueError("it is no list of shards")
    return [_read_shard(each) for each in plain]


def _read_shard(plain: Any) -> Shard:
    if type(plain) is not list or len(plain) != 5:
        raise ValueError("it is no list of shards")
    url, form, size, stated, entry = plain
    if type(url) is not str or not url:
        raise ValueError("a URL is missing, or is no text")
    if type(form) is not list or len(form) != 2 or form[0] not in _FORMATS or form[1] not in (None, "gzip", "zstd"):
        raise ValueError("a format is not known")
    if not all(each is None or (type(each) is int and 0 <= each < 1 << 63) for each in (size, stated)):
        raise ValueError("a size is out of range")
    mds = None if entry is None else parse_mds_entry(entry)
    return Shard(url, ShardFormat(*form), size, None if mds is None else mds.samples, mds, stated=stated)


def fingerprint_of(names: Sequence[str], shards: Sequence[Shard]) -> str:
    """Return a digest of the shards' names, sizes and cut points."""
    digest = hashlib.blake2b(digest_size=16)
    for name, shard in zip(names, shards, strict=True):
        digest.update(repr((name, *shard[1:-1])).encode(errors="surrogatepass"))  # without `stated`
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
