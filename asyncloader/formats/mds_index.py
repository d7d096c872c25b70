"""MDS's ``index.json``: which shards a dataset has, what is in them, and where they can be cut. Pure.

The index comes over the network and is believed in nothing: names must stay below the index's folder, numbers must
be possible, sizes must agree with encodings. Source: mosaicml/streaming, `streaming/base/format/mds/{writer,reader}.py`
(layout version 2).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from asyncloader.formats.base import ShardError, ShardRange
from asyncloader.formats.mds_encodings import Encoding, mds_encoding
from asyncloader.formats.members import Compression

__all__ = ["Column", "MdsShard", "parse_mds_index"]

UINT32 = 1 << 32
RESERVED = frozenset(("__key__", "__url__"))
COMPRESSIONS: dict[str, Compression] = {"zstd": "zstd", "gz": "gzip"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name and how its values are written."""

    name: str
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class MdsShard:
    """One shard of a dataset.

    Attributes:
        path: of the object to read, relative to the index's folder.
        samples: how many.
        size: bytes of the shard, decompressed.
        stored_size: bytes of the object at `path`.
        compression: of this object; None: it is the shard as it is.
        columns: of each sample, in the order in which they are stored.
    """

    path: str
    samples: int
    size: int
    stored_size: int
    compression: Compression | None
    columns: tuple[Column, ...]

    @property
    def header_size(self) -> int:
        """Bytes at the beginning of the shard that `offsets` wants: the count and the offsets of the samples."""
        return 4 + 4 * (self.samples + 1)

    def offsets(self, header: bytes, *, url: str = "") -> npt.NDArray[np.int64]:
        """Check and decode a shard's first `header_size` bytes.

        Returns:
            The offset of each sample and, last, of the end: ``samples + 1`` numbers, ascending.

        Raises:
            ShardError: the header contradicts the index or itself.
        """
        if len(header) != self.header_size:
            raise ShardError(f"an MDS header of {len(header):,} bytes, not {self.header_size:,}", url=url, offset=0)
        count = int.from_bytes(header[:4], "little")
        if count != self.samples:
            raise ShardError(f"the shard has {count:,} samples, its index says {self.samples:,}", url=url, offset=0)
        offsets = np.frombuffer(header, "<u4", offset=4).astype(np.int64)
        if offsets[0] < self.header_size or offsets[-1] != self.size or (np.diff(offsets) < 1).any():
            raise ShardError("the offsets in the MDS header are impossible", url=url, offset=4)
        return offsets

    def cut(self, offsets: npt.NDArray[np.int64], parts: int) -> list[ShardRange]:
        """Cut an uncompressed shard into `parts` of equally many samples (fewer, where there are fewer samples).

        Args:
            offsets: as `offsets` gives them.
            parts: how many.

        Raises:
            ValueError: `parts` is below 1.
        """
        if parts < 1:
            raise ValueError(f"cannot cut a shard into {parts} parts")
        parts = max(1, min(parts, self.samples))
        edges = [int(offsets[self.samples * part // parts]) for part in range(parts + 1)]
        return [ShardRange(start, stop, sync=False) for start, stop in pairwise(edges)]


def parse_mds_index(data: bytes, *, url: str = "") -> list[MdsShard]:
    """The shards of a dataset, from its ``index.json``.

    Args:
        data: the whole file; bound its size when you read it.
        url: its URL, for errors.

    Raises:
        ShardError: no index of layout version 2, or one that cannot be true; a column is pickled or of an unknown
            encoding; a compression other than zstd and gz.
    """
    try:
        index: Any = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ShardError(f"the MDS index is no JSON: {error}", url=url) from error
    try:
        _expect(_member(index, "version") == 2, "version is not 2")
        return [_shard(shard) for shard in _list(index, "shards")]
    except ShardError:
        raise
    except ValueError as error:
        raise ShardError(f"the MDS index cannot be used: {error}", url=url) from error


def _shard(shard: Any) -> MdsShard:
    _expect(_member(shard, "version") == 2, "a shard's version is not 2")
    _expect(_member(shard, "format") == "mds", "a shard's format is not 'mds'")
    samples = _number(shard, "samples", UINT32)
    raw, stored, compression = _member(shard, "raw_data"), _member(shard, "zip_data"), _member(shard, "compression")
    size = _number(raw, "bytes", UINT32)  # offsets in a shard have 32 bits
    kind: Compression | None = None
    if stored is not None or compression is not None:
        name = compression.partition(":")[0] if isinstance(compression, str) else None
        _expect(name in COMPRESSIONS, f"a shard's compression is {str(compression)[:80]!r}; zstd and gz can be read")
        kind = COMPRESSIONS[cast("str", name)]
    else:
        stored = raw
    columns = _columns(shard)
    smallest = sum(4 if column.encoding.size is None else column.encoding.size for column in columns)
    path, stored_size = _path(stored), _number(stored, "bytes", 1 << 63)
    result = MdsShard(path, samples, size, stored_size, kind, columns)
    _expect(result.header_size + samples * smallest <= size, f"shard {path!r} is too small for {samples:,} samples")
    return result


def _columns(shard: Any) -> tuple[Column, ...]:
    names, encodings, sizes = (_list(shard, f"column_{what}") for what in ("names", "encodings", "sizes"))
    _expect(0 < len(names) == len(encodings) == len(sizes), "a shard's lists of columns differ in length, or are empty")
    _expect(all(isinstance(name, str) for name in names), "a column's name is no text")
    _expect(len(set(names)) == len(names) and not RESERVED & set(names), "column names repeat, or are __key__, __url__")
    columns: list[Column] = []
    for name, text, size in zip(names, encodings, sizes, strict=True):
        _expect(isinstance(text, str), f"the encoding of column {name!r} is no text")
        try:
            encoding = mds_encoding(text)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from None
        _expect((size or None) == encoding.size, f"column {name!r} has size {str(size)[:40]}, not {encoding.size}")
        columns.append(Column(name, encoding))
    return tuple(columns)


def _path(info: Any) -> str:
    path = _member(info, "basename")
    _expect(isinstance(path, str), "a shard's basename is no text")
    bad = any(part in ("", ".", "..") for part in path.split("/")) or set(path) & set("\\\0:?#%")
    _expect(not bad and path.isprintable(), f"a shard's basename {path[:80]!r} is no plain path below the index")
    return cast("str", path)


def _member(value: Any, name: str) -> Any:
    _expect(type(value) is dict and name in value, f"{name!r} is missing")
    return value[name]


def _list(value: Any, name: str) -> list[Any]:
    member = _member(value, name)
    _expect(type(member) is list, f"{name!r} is no list")
    return cast("list[Any]", member)


def _number(value: Any, name: str, limit: int) -> int:
    number = _member(value, name)
    _expect(type(number) is int and 0 <= number < limit, f"{name!r} is {str(number)[:40]}, not in [0, {limit})")
    return cast("int", number)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
