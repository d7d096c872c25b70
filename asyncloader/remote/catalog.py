"""Describes shards: where they are, and how they are read. Pure.

Data path: discovery, shard_sizes -> [catalog] -> shard_splitting -> assignment -> worker_stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, overload

from asyncloader.formats import MdsShard, ShardFormat, shard_format
from asyncloader.formats.base import base_name

PARQUET = ShardFormat("parquet", None)
"""Not read by a push parser: see `formats.parquet`."""

CUSTOM = ShardFormat("custom", None)
"""Read by a reader of the user's own."""

PARQUET_ENDINGS = (".parquet", ".pq")

BUCKETS = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
"""Schemes of object stores: ``scheme://bucket/key``."""


_ORIGIN = r"(?:[A-Za-z][A-Za-z0-9]*://(?:[A-Za-z0-9.-]+:[0-9]+(?=/))?)?"
_PLAIN = re.compile(_ORIGIN + r"[A-Za-z0-9_./=-]+")
_PLAIN_LINE = re.compile(f"^{_ORIGIN}(?:[A-Za-z0-9_./=-]*/)?[A-Za-z0-9_=-]+[.]([A-Za-z0-9_.=-]+)$", re.MULTILINE)

_MOST_ENDINGS = 1000

_LINES = 10_000
"""URLs that are looked at together."""


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


class PlainShards(Sequence[Shard]):
    """Shards of one format of which nothing else is known. Each is made when it is asked for: there may be a million.

    Attributes:
        urls: of the shards, as `PlainFormats.find` takes them: no URL has a query.
        format: of all of them.
    """

    def __init__(self, urls: list[str], format: ShardFormat) -> None:
        self.urls = urls
        self.format = format

    def __len__(self) -> int:
        return len(self.urls)

    @overload
    def __getitem__(self, at: int) -> Shard: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Shard]: ...

    def __getitem__(self, at: int | slice) -> Shard | Sequence[Shard]:
        return PlainShards(self.urls[at], self.format) if isinstance(at, slice) else Shard(self.urls[at], self.format)


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


class PlainFormats:
    """Formats of plain URLs of single shards, each ending looked up once: there may be a million URLs."""

    def __init__(self) -> None:
        self._by_ending: dict[str, ShardFormat | None] = {}

    def find(self, url: str) -> ShardFormat | None:
        """Return the format of a URL of letters, digits and a few signs; None: it must be looked at more closely."""
        stem, _, ending = url[url.rfind("/") + 1 :].partition(".")
        if not (stem and ending) or _PLAIN.fullmatch(url) is None:
            return None
        if ending not in self._by_ending:
            if len(self._by_ending) >= _MOST_ENDINGS:  # numbers between dots
                self._by_ending.clear()
            form: ShardFormat | None = None
            with suppress(ValueError):
                form = format_of(url)
            # MDS shards are found by their index.
            self._by_ending[ending] = None if form is None or form.name == "mds" else form
        return self._by_ending[ending]

    def find_all(self, urls: Sequence[str]) -> ShardFormat | None:
        """Return the format of URLs for all of which `find` returns the same; None: they must be looked at one by one.

        Takes a fifth of the time of `find` for each.
        """
        found: set[ShardFormat | None] = set()
        for first in range(0, len(urls), _LINES):
            lines = urls[first : first + _LINES]
            text = "\n".join(lines)
            endings: list[str] = _PLAIN_LINE.findall(text)
            # A name may contain line ends: then there are more of them than names.
            if len(endings) != len(lines) or text.count("\n") != len(lines) - 1:
                return None
            found.update(self.find(f"a.{ending}") for ending in set(endings))
            if len(found) > 1:
                return None
        return found.pop() if found else None
