"""Reads MDS shards, MosaicML's format: the index, the encodings of columns, and the samples. Pure.

Data path: transport -> chunks -> [mds: `MdsReader`] -> samples; and index.json -> [mds: `parse_mds_index`] ->
discovery.

*Index.* ``index.json`` lists the shards of a dataset, their columns and sizes. It comes over the network and is not
trusted: paths must stay below the index's folder, numbers must be possible, sizes must agree with encodings.

*Encodings*, by the names that the index uses. Nothing is ever unpickled, because that would execute code from the
network; `pkl` is refused.

    bytes                    unchanged; also jpeg[:quality], jpegarray, png and pil, which `decode=` may decode
    str  str_int  str_float  str_decimal  json      UTF-8 text
    int  int8 ... int64  uint8 ... uint64  float16 ... float64       little-endian
    ndarray[:dtype[:shape]]  [dtype: 1, if not named] [ndim << 2 | log2 of the dims' size: 1, dims, if not named] values

*Shards.* Samples of typed columns after a table of offsets, all of it little-endian:

    count: u4    offsets: u4 x (count + 1)    config: JSON    samples
    sample:      sizes of the variable-size columns: u4 each    the columns' bytes

A sample's size follows from its own bytes, so a reader may start at any sample without the table.

Source: mosaicml/streaming, `streaming/base/format/mds/{writer,reader,encodings}.py` (layout version 2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from struct import Struct
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from asyncloader.errors import ShardError
from asyncloader.formats.base import (
    MAX_SAMPLE_BYTES,
    OnBad,
    Parser,
    PushReader,
    ReadWhole,
    Sample,
    SampleSlices,
    base_name,
)
from asyncloader.formats.compressed import Compression

UINT32 = 1 << 32
RESERVED = frozenset(("__key__", "__url__"))
COMPRESSIONS: dict[str, Compression] = {"zstd": "zstd", "gz": "gzip"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: of the field.
        encoding: the index's name of the encoding of its values; see `mds_encoding`.
        size: bytes of every value; None if values differ in size.
    """

    name: str
    encoding: str
    size: int | None


@dataclass(frozen=True, slots=True)
class MdsShard:
    """One shard of a dataset.

    Attributes:
        path: of the object to read, relative to the index's folder.
        samples: number of samples.
        size: bytes of the shard, decompressed.
        stored_size: bytes of the object at `path`.
        compression: of this object; None: it is not compressed.
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
        """Number of bytes at the beginning of the shard that `offsets` decodes: the samples' count and offsets."""
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
        # A wrong offset would let a range begin inside a sample.
        if offsets[0] < self.header_size or offsets[-1] != self.size or (np.diff(offsets) < 1).any():
            raise ShardError("the offsets in the MDS header are impossible", url=url, offset=4)
        return offsets


def parse_mds_index(data: bytes, *, url: str = "") -> list[MdsShard]:
    """Return the shards of a dataset, from its ``index.json``.

    Args:
        data: the whole file; the caller should bound its size.
        url: its URL, for errors.

    Raises:
        ShardError: the index has another layout version than 2, or contradicts itself; a column is pickled or has an
            unknown encoding; a compression is neither zstd nor gz.
    """
    try:
        index: Any = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ShardError(f"the MDS index is no JSON: {error}", url=url) from error
    try:
        _expect(_member(index, "version") == 2, "version is not 2")
        return [parse_mds_entry(shard) for shard in _member(index, "shards", list)]
    except ShardError:
        raise
    except ValueError as error:
        raise ShardError(f"the MDS index cannot be used: {error}", url=url) from error


def mds_entry(shard: MdsShard) -> dict[str, Any]:
    """Return the entry of a shard in an index, as `parse_mds_entry` reads it."""
    stored = {"basename": shard.path, "bytes": shard.stored_size}
    names = {kind: name for name, kind in COMPRESSIONS.items()}
    return {
        "version": 2,
        "format": "mds",
        "samples": shard.samples,
        "raw_data": {"basename": shard.path, "bytes": shard.size},
        "zip_data": None if shard.compression is None else stored,
        "compression": None if shard.compression is None else names[shard.compression],
        "column_names": [column.name for column in shard.columns],
        "column_encodings": [column.encoding for column in shard.columns],
        "column_sizes": [column.size for column in shard.columns],
    }


def parse_mds_entry(shard: Any) -> MdsShard:
    """Return the shard of an entry of an index.

    Raises:
        ValueError: the entry contradicts itself, or cannot be used.
    """
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
    smallest = sum(4 if column.size is None else column.size for column in columns)
    path, stored_size = _path(stored), _number(stored, "bytes", 1 << 63)
    result = MdsShard(path, samples, size, stored_size, kind, columns)
    # An index may claim any number of samples: the number must fit into the claimed size, which is below 4 GiB.
    _expect(result.header_size + samples * smallest <= size, f"shard {path!r} is too small for {samples:,} samples")
    return result


def _columns(shard: Any) -> tuple[Column, ...]:
    names, encodings, sizes = (_member(shard, f"column_{what}", list) for what in ("names", "encodings", "sizes"))
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
        columns.append(Column(name, text, encoding.size))
    return tuple(columns)


def _path(info: Any) -> str:
    path: str = _member(info, "basename", str)
    # A path from the network: it must not leave the index's folder, also where the store's own rules are looser.
    bad = any(part in ("", ".", "..") for part in path.split("/")) or set(path) & set("\\\0:?#%")
    _expect(not bad and path.isprintable(), f"a shard's basename {path[:80]!r} is no plain path below the index")
    return path


def _member(value: Any, name: str, kind: type[Any] = object) -> Any:
    _expect(type(value) is dict and name in value, f"{name!r} is missing")
    _expect(isinstance(value[name], kind), f"{name!r} is no {kind.__name__}")
    return value[name]


def _number(value: Any, name: str, limit: int) -> int:
    number = _member(value, name)
    _expect(type(number) is int and 0 <= number < limit, f"{name!r} is {str(number)[:40]}, not in [0, {limit})")
    return cast("int", number)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


Decode: TypeAlias = Callable[[bytes], Any]


class Encoding(NamedTuple):
    """The encoding of one column's values.

    Attributes:
        size: bytes of every value; None if values differ in size.
        decode: decodes a value; raises ValueError, ArithmeticError or RecursionError for invalid bytes.
    """

    size: int | None
    decode: Decode


TEXTS: dict[str, Callable[[str], Any]] = {
    "str_int": int,
    "str_float": float,
    "str_decimal": Decimal,
    "json": json.loads,
}
RAW = frozenset(("bytes", "jpeg", "jpegarray", "png", "pil"))
DTYPE_OF_CODE = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
SCALARS = frozenset(DTYPE_OF_CODE.values())
MAX_DIMS = 63


@lru_cache(maxsize=256)  # asked for each sample that is read at random
def mds_encoding(text: str) -> Encoding:
    """Return the encoding with the index's name `text`.

    Raises:
        ValueError: the encoding is unknown, malformed, or `pkl`.
    """
    name, colon, options = text.partition(":")
    if name == "ndarray":
        return _ndarray(options)
    if colon and name != "jpeg":
        raise ValueError(f"encoding {text!r} has options, and {name!r} takes none")
    if name in RAW:
        return Encoding(None, bytes)
    if name == "int":
        return Encoding(8, lambda data: int.from_bytes(data, "little", signed=True))
    if name in SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        return Encoding(dtype.itemsize, lambda data: np.frombuffer(data, dtype)[0])
    if name == "str":
        return Encoding(None, bytes.decode)
    if parse := TEXTS.get(name):
        return Encoding(None, lambda data: parse(data.decode()))
    if name == "pkl":
        raise ValueError(
            "encoding 'pkl' is a pickle, which runs code when it is read: write the column as bytes, json or ndarray"
        )
    raise ValueError(f"encoding {text[:80]!r} is unknown")


def _ndarray(options: str) -> Encoding:
    name, _, dims = options.partition(":")
    if name and name not in SCALARS:
        raise ValueError(f"encoding ndarray has the unknown dtype {name[:80]!r}")
    dtype = np.dtype(name).newbyteorder("<") if name else None
    shape: tuple[int, ...] | None = None
    if dims:
        parts = dims.split(",", MAX_DIMS)
        if len(parts) > MAX_DIMS or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
            raise ValueError(f"encoding ndarray has the impossible shape {dims[:80]!r}")
        shape = tuple(int(part) for part in parts)
        if 0 in shape:
            raise ValueError(f"encoding ndarray has the empty shape {dims[:80]!r}")
    size = dtype.itemsize * math.prod(shape) if dtype is not None and shape is not None else None
    return Encoding(size, partial(_array, dtype, shape))


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: bytes) -> npt.NDArray[Any]:
    """Decode an array, private and writable."""
    pos = 0
    if dtype is None:
        code = data[0] if data else None
        if code not in DTYPE_OF_CODE:
            raise ValueError(f"an array of the unknown dtype {code}")
        dtype = np.dtype(DTYPE_OF_CODE[code]).newbyteorder("<")
        pos = 1
    if shape is None:
        if len(data) <= pos:
            raise ValueError("an array without a shape")
        ndim, width = data[pos] >> 2, 1 << (data[pos] & 3)
        pos += 1
        dims = data[pos : pos + ndim * width]
        if len(dims) < ndim * width:
            raise ValueError(f"an array of {ndim} dimensions, cut off inside its shape")
        shape = tuple(int.from_bytes(dims[at : at + width], "little") for at in range(0, len(dims), width))
        pos += len(dims)
    # Compared before memory is allocated: the shape is a claim of the shard.
    if math.prod(shape) * dtype.itemsize != len(data) - pos:
        raise ValueError(f"an array of shape {shape[:8]} and type {dtype.name} cannot have {len(data) - pos:,} bytes")
    return np.frombuffer(data, dtype, offset=pos).reshape(shape).copy()


class MdsReader(PushReader):
    """Reads an MDS shard. Fields are decoded by their columns' encodings; the key is the shard's name and the offset.

    A shard can be cut at sample boundaries (`MdsShard.cut`). For a compressed shard, wrap the reader in a
    `CompressedReader`. Samples that `on_bad` can skip: samples with a value that is invalid for its encoding.

    Args, besides those of `base.Reader`:
        shard: the shard's entry in the index.
        start: 0, or an offset from `MdsShard.offsets`.
        max_sample_bytes: limits the table of offsets, too.
    """

    def __init__(
        self,
        url: str,
        shard: MdsShard,
        *,
        start: int = 0,
        stop: int | None = None,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        on_bad: OnBad | None = None,
    ) -> None:
        stop = shard.size if stop is None else min(stop, shard.size)
        super().__init__(url, start=start, stop=stop, max_sample_bytes=max_sample_bytes, on_bad=on_bad)
        self._shard = shard
        self._end = stop
        sizes = [column.size for column in shard.columns]
        self._columns = _columns_of(shard)
        self._fixed = sum(size for size in sizes if size is not None)
        self._sizes = Struct(f"<{sizes.count(None)}I")

    def _parse(self) -> Parser:
        ends: Iterator[Any] = iter(())
        if self._at == 0:
            if self._shard.header_size > self._max:
                self._fail(f"a table of offsets larger than max_sample_bytes={self._max:,}", 0)
            offsets = self._shard.offsets((yield self._shard.header_size), url=self._url)
            yield -(int(offsets[0]) - self._at)  # skip the config, which is in the index, too
            ends = iter(offsets[1:])
        while self._left and self._at < self._end:
            at = self._at
            head = self._sizes.unpack((yield self._sizes.size))
            size = sum(head) + self._fixed
            # The sizes are claims of the shard: checked before the bytes are requested.
            self._check_size(size + self._sizes.size, at)
            after = self._at + size
            # A wrong size could swallow the next samples, which another range may return.
            if after > self._end:
                self._fail("a sample ends after its shard or its range does", at)
            if after != next(ends, after):
                self._fail("a sample does not end where the table of offsets says", at)
            if self._skip:
                yield -size
                self._skip -= 1
                continue
            data = yield size
            try:
                fields = _decode(self._columns, data, 0, head)
            except ValueError as error:
                self._bad(str(error), at, self._at, error.__cause__)
            else:
                self._give(fields, at, self._at)


_Columns: TypeAlias = "list[tuple[str, int | None, Decode | None]]"
"""Of each column the name, the size of all values, and what decodes them; None: they stay bytes."""


def _columns_of(shard: MdsShard) -> _Columns:
    return [
        (column.name, column.size, None if column.encoding in RAW else mds_encoding(column.encoding).decode)
        for column in shard.columns
    ]


def _decode(columns: _Columns, source: SampleSlices, at: int, sizes: tuple[int, ...]) -> Sample:
    """Return the fields whose bytes begin at a position of `source`.

    Args:
        columns: of the sample.
        source: has its bytes.
        at: the position.
        sizes: of the values that differ in size.

    Raises:
        ValueError: a value cannot be decoded.
    """
    fields: Sample = {}
    lengths = iter(sizes)
    name = ""
    try:
        for name, size, decode in columns:
            stop = at + (next(lengths) if size is None else size)
            fields[name] = source[at:stop] if decode is None else decode(source[at:stop])
            at = stop
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"column {name!r} cannot be decoded: {error}") from error
    return fields


def mds_samples(url: str, shard: MdsShard) -> ReadWhole:
    """Return the function that reads samples like an `MdsReader`."""
    name, columns = base_name(url), _columns_of(shard)
    sizes = Struct(f"<{sum(column.size is None for column in shard.columns)}I")
    unpack, nbytes = sizes.unpack, sizes.size
    fixed = nbytes + sum(column.size or 0 for column in shard.columns)

    def read(source: SampleSlices, at: int, end: int, start: int) -> Sample | None:
        if end - at < fixed:
            return None
        head = unpack(source[at : at + nbytes])
        if end - at != fixed + sum(head):
            return None
        try:
            fields = _decode(columns, source, at + nbytes, head)
        except ValueError:
            return None
        fields["__key__"] = f"{name}:{start}"
        fields["__url__"] = url
        return fields

    return read
