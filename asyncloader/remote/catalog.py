"""Describes shards: where they are, and how they are read. Pure.

Data path: discovery, shard_sizes -> [catalog] -> shard_splitting -> assignment -> worker_stream.
Data path: discovery -> [catalog: plain_list] -> ranks.agreement, ranks.exchange -> [read_list] -> dataset.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any, Generic, NamedTuple, TypeVar

from asyncloader.formats import MdsShard, ShardFormat, shard_format
from asyncloader.formats.base import base_name
from asyncloader.formats.mds import mds_entry, parse_mds_entry

T = TypeVar("T")

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


class LazySequence(Sequence[T], Generic[T]):
    """Elements of which each is made of its key when it is asked for: there may be a million.

    Args:
        keys: of the elements.
    """

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    def make(self, key: Any) -> T:
        """Return the element of a key."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            return self.make(self.keys[at])
        some = copy(self)
        some.keys = self.keys[at]
        return some


class PlainShards(LazySequence[Shard]):
    """Shards of one format of which nothing else is known.

    Attributes:
        keys: the shards' URLs, as `PlainFormats.find` takes them: no URL has a query.
        format: of all of them.
    """

    def __init__(self, urls: list[str], format: ShardFormat) -> None:
        super().__init__(urls)
        self.format = format

    def make(self, key: str) -> Shard:
        """Return the shard of a URL."""
        return Shard(key, self.format)


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


_ANYWHERE = BUCKETS | {"hf"}  # schemes of URLs that name the same object on every host
_TOGETHER = 10_000  # shards whose names are digested at once
_COMPARED = 1000

_FORMATS = ("tar", "jsonl", "tfrecord", "mds", "parquet", "custom")


def plain_list(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the values of shards that were listed, in columns, as JSON has them."""
    if isinstance(shards, PlainShards):
        one: dict[str, Any] = {"urls": shards.keys, "formats": [shards.format], "format_of": None}
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
