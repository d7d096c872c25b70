"""Describes shards: where they are, and how they are read. Pure.

Data path: discovery, shard_sizes -> [catalog] -> shard_splitting -> assignment -> worker_stream.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

from asyncloader.formats import MdsShard, ShardFormat, shard_format
from asyncloader.formats.base import base_name

PARQUET = ShardFormat("parquet", None)
"""Not read by a push parser: see `formats.parquet`."""

CUSTOM = ShardFormat("custom", None)
"""Read by a reader of the user's own."""

PARQUET_ENDINGS = (".parquet", ".pq")


_PLAIN = re.compile(r"(?:[A-Za-z][A-Za-z0-9]*://)?[A-Za-z0-9_./=-]+")

_MOST_ENDINGS = 1000


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
    """

    url: str
    format: ShardFormat
    size: int | None = None
    samples: int | None = None
    mds: MdsShard | None = None
    edges: tuple[int, ...] | None = None


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
