"""Readers of shards: from the bytes of tar (WebDataset), JSON lines, MDS, TFRecord and Parquet to samples.

Data path: transport -> chunks -> [formats: the reader for the shard's format] -> samples.

All readers but Parquet's are push parsers without I/O; `base` has their contract, which a user's own reader must
satisfy, too. A Parquet file's index is at its end: `parquet` requests the byte ranges that it needs.

`open_reader` chooses the reader by the shard's extension:

    .tar                     tar        .tfrecord .tfrecords     tfrecord
    .jsonl .ndjson           jsonl      .mds                     mds (needs its index: `MdsReader`)

each also with ``.gz`` or ``.zst`` appended, and ``.tgz``.
"""

from __future__ import annotations

from collections.abc import Callable
from posixpath import splitext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.errors import ShardError
from asyncloader.formats.base import (
    MAX_SAMPLE_BYTES,
    Located,
    LocatedSamples,
    OnBad,
    Reader,
    ReadWhole,
    Sample,
    ShardRange,
    ShardReader,
    base_name,
)
from asyncloader.formats.compressed import CompressedReader, Compression, MemberDecoder
from asyncloader.formats.indexed import IndexedReader
from asyncloader.formats.jsonl import JsonlReader, json_lines
from asyncloader.formats.mds import MdsReader, MdsShard, mds_samples, parse_mds_index
from asyncloader.formats.tar import TarReader, tar_samples
from asyncloader.formats.tfrecord import TFRecordReader, parse_example, tfrecords

__all__ = [
    "MAX_SAMPLE_BYTES",
    "CompressedReader",
    "IndexedReader",
    "JsonlReader",
    "Located",
    "LocatedSamples",
    "MdsReader",
    "MdsShard",
    "OnBad",
    "Sample",
    "ShardError",
    "ShardFormat",
    "ShardRange",
    "ShardReader",
    "TFRecordReader",
    "TarReader",
    "cut_shard",
    "open_indexed_reader",
    "open_reader",
    "parse_example",
    "parse_mds_index",
    "read_whole",
    "shard_format",
]


EXTENSIONS = {
    ".tar": "tar",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".mds": "mds",
}
READERS: dict[str, Callable[..., Reader]] = {
    "tar": TarReader,
    "tfrecord": TFRecordReader,
    "jsonl": JsonlReader,
    "mds": MdsReader,
}
COMPRESSED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}


class ShardFormat(NamedTuple):
    """A format's name (``"tar"``, ``"jsonl"``, ``"tfrecord"``, ``"mds"``) and the compression around it."""

    name: str
    compression: Compression | None


def shard_format(url: str) -> ShardFormat:
    """Return the format for the extension of `url`, ignoring case, query and fragment.

    Raises:
        ValueError: no known extension.
    """
    name, ending = splitext(base_name(url).lower())
    if ending == ".tgz":
        return ShardFormat("tar", "gzip")
    compression = COMPRESSED.get(ending)
    form = EXTENSIONS.get(ending if compression is None else splitext(name)[1])
    if form is not None:
        return ShardFormat(form, compression)
    known = ", ".join((*EXTENSIONS, ".tgz", ".parquet"))
    raise ValueError(
        f"the extension of {url!r} says no format. Known are {known}, all but the last also with .gz or .zst. If it is "
        'one of them all the same, give format=, such as format="tar"; rename it or convert it otherwise'
    )


def open_reader(
    url: str,
    format: ShardFormat | None = None,
    *,
    part: ShardRange | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    on_bad: OnBad | None = None,
    shard: MdsShard | None = None,
    skip: int = 0,
    most: int | None = None,
) -> ShardReader:
    """Make the reader of a shard. It opens nothing; `base` shows a caller's loop.

    Args:
        url: the shard's.
        format: None: by the extension.
        part: the range to read. To resume, its `start` is the offset that came with the last sample, and `sync` is
            False. None: the whole shard.
        max_sample_bytes: refuse a sample with more (decompressed) bytes, before memory is allocated for it.
        on_bad: called with each bad sample that can be skipped. None: the first bad sample is raised.
        shard: the index's entry of an MDS shard. Its compression is used, not the extension's.
        skip: samples, good or bad, at the beginning of the range that are passed over: their values are not made, and
            no error of theirs is reported.
        most: samples, good or bad, that are read after them; None: all of the range.

    Raises:
        ValueError: no format has this extension; an MDS shard without `shard`; `part` is not a valid range.
        ImportError: the shard is compressed with zstd, and no package for it is installed.
    """
    name, compression = shard_format(url) if format is None else format
    start, stop, sync = part or ShardRange(0, None, sync=False)
    if name not in READERS:
        raise ValueError(f"format {name!r} is unknown; the formats are {', '.join(READERS)}")
    if sync and name != "jsonl":
        raise ValueError(f"a {name} shard can be read only from where a sample begins")
    options: dict[str, Any] = {"sync": True} if sync else {}
    if name == "mds":
        if shard is None:
            raise ValueError("an MDS shard is read with its index: give the MdsShard from parse_mds_index")
        compression, options = shard.compression, {"shard": shard}
    make = READERS[name]
    reader = make(url, start=start, stop=stop, max_sample_bytes=max_sample_bytes, on_bad=on_bad, **options)
    reader.narrow(skip, most)
    return reader if compression is None else CompressedReader(url, reader, MemberDecoder(compression))


def read_whole(url: str, name: str, shard: MdsShard | None) -> ReadWhole:
    """Return the function that reads samples of a shard, decompressed.

    Args:
        url: the shard's.
        name: of its format.
        shard: the index's entry of an MDS shard.
    """
    if shard is not None:
        return mds_samples(url, shard)
    return {"tar": tar_samples, "tfrecord": tfrecords}.get(name, json_lines)(url)


def open_indexed_reader(
    url: str,
    format: ShardFormat,
    edges: npt.NDArray[np.int64],
    *,
    last: bool,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    on_bad: OnBad | None = None,
    shard: MdsShard | None = None,
) -> IndexedReader:
    """Make the reader of samples whose offsets are known, of a shard that is not compressed.

    Args:
        url: the shard's.
        format: its format.
        edges: where the samples begin and, last, where they end; at least one sample.
        last: whether they are the last of the shard.
        max_sample_bytes: as of `open_reader`.
        on_bad: called with each bad sample that can be skipped. None: the first bad sample is raised.
        shard: the index's entry of an MDS shard.
    """

    def open_rest(start: int, samples: int) -> ShardReader:
        part = ShardRange(start, None if last else int(edges[-1]), sync=False)
        limits: Any = {"max_sample_bytes": max_sample_bytes, "on_bad": on_bad}
        return open_reader(url, format, part=part, shard=shard, most=samples, **limits)

    read = read_whole(url, format.name, shard)
    return IndexedReader(read, edges, open_rest, last=last, max_sample_bytes=max_sample_bytes)


def cut_shard(format: ShardFormat, size: int, parts: int) -> list[ShardRange]:
    """Cut a shard of `size` bytes into at most `parts` ranges of equal size; into one range if the format cannot be cut
    by size. Only JSON lines can: each line is in exactly one part, and a part that lies within a line has none.
    """
    if format != ("jsonl", None):
        return [ShardRange(0, None, sync=False)]
    parts = max(1, min(parts, size))
    edges = [size * part // parts for part in range(parts)]
    return [ShardRange(start, stop, start > 0) for start, stop in zip(edges, [*edges[1:], None], strict=True)]
