"""The file that says where each sample of a shard begins and ends. Pure.

Data path: shard_writing or indexing -> [sample_index] -> ``_a.tar.samples`` beside ``a.tar``, or the host's folder ->
shard_reader.

Little-endian, and never trusted when it is read:

    head      magic, version, bytes per size (4 or 8), lengths of format and etag, the object's size, the offset of the
              first sample, the number of samples, and 1 if the shard could be read to its end
    format    "tar", "jsonl.gzip": offsets in a compressed shard count decompressed bytes
    etag      the store's name of these bytes; empty without a name
    sizes     of each sample, with what lies between it and the sample before
    crc       CRC-32 of all of that
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt

from asyncloader.formats import ShardFormat

MAX_INDEX_BYTES = 1 << 30
"""The largest index that is read: of 250 million samples."""

_MAGIC = b"\x89samples"
_HEAD = Struct("<8sHHHHQQQQ")
_CRC = Struct("<I")
_MOST = 1 << 60  # bytes of a shard; twice as much still fits into an int64


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Where the samples of one version of a shard are.

    Attributes:
        format: the shard's, with its compression: ``"tar"``, ``"jsonl.gzip"``.
        size: bytes of the object.
        etag: its version; None without versions.
        edges: offsets at which the samples begin and, last, at which the last sample ends: int64, never
            descending, one more than there are samples. A sample lies between two of them, maybe behind bytes of no
            sample.
        whole: the shard could be read to its end. If not, what follows the last good sample counts as one more, and
            raises the error.
    """

    format: str
    size: int
    etag: str | None
    edges: npt.NDArray[np.int64]
    whole: bool

    def __len__(self) -> int:
        return len(self.edges) - 1


def format_name(format: ShardFormat) -> str:
    """Return the text that stands for a format and its compression in an index."""
    return ".".join(filter(None, format))


def index_name(name: str) -> str:
    """Return the name of the index beside the shard `name`. No reader takes it for a shard."""
    return f"_{name}.samples"


def dump_index(index: SampleIndex) -> bytes:
    """Return the file of an index."""
    sizes = np.diff(index.edges)
    width = 4 if not len(sizes) or int(sizes.max()) < 1 << 32 else 8
    kind, etag = index.format.encode(), (index.etag or "").encode("utf-8", "surrogatepass")
    numbers = (index.size, int(index.edges[0]), len(sizes), int(index.whole))
    body = b"".join(
        (
            _HEAD.pack(_MAGIC, 1, width, len(kind), len(etag), *numbers),
            kind,
            etag,
            sizes.astype(f"<u{width}").tobytes(),
        )
    )
    return body + _CRC.pack(zlib.crc32(body))


def parse_index(data: bytes) -> SampleIndex:
    """Parse and check the file of an index, which may be a stranger's.

    Raises:
        ValueError: it is no index, it is damaged, or its numbers are impossible.
    """
    if len(data) < _HEAD.size + _CRC.size:
        raise ValueError(f"it has {len(data)} bytes, and is no index of samples")
    magic, version, width, format_length, etag_length, size, first, count, whole = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != 1:
        raise ValueError("it is no index of samples of version 1")
    at = _HEAD.size + format_length + etag_length
    # Compared before the array is made: the numbers are claims of the file.
    if width not in (4, 8) or whole > 1 or len(data) != at + width * count + _CRC.size:
        raise ValueError("its length contradicts its head")
    if zlib.crc32(memoryview(data)[: -_CRC.size]) != _CRC.unpack_from(data, len(data) - _CRC.size)[0]:
        raise ValueError("it is damaged: its checksum is wrong")
    format_end = _HEAD.size + format_length
    try:
        kind, etag = data[_HEAD.size : format_end].decode(), data[format_end:at].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"its names are no text: {error}") from None
    sizes = np.frombuffer(data, f"<u{width}", count, at)
    # As floats first: a sum of integers could wrap around.
    if max(size, first) > _MOST or float(sizes.sum(dtype=np.float64)) + first > _MOST:
        raise ValueError("its offsets are impossible")
    edges = np.empty(count + 1, np.int64)
    edges[0] = first
    np.cumsum(sizes, out=edges[1:], dtype=np.int64)
    edges[1:] += first
    if "." not in kind and edges[-1] > size:
        raise ValueError(f"its samples end at byte {edges[-1]:,}, and the shard has {size:,}")
    return SampleIndex(kind, size, etag or None, edges, bool(whole))
