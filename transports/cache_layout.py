"""Names, footers and arithmetic of the local cache's files. Pure.

Data path: cached -> cache_store -> [cache_layout].

    cache_dir/asyncloader-cache-1/
        CACHEDIR.TAG            identifies the directory, for backup programs that skip caches
        used                    bytes in use; see `cache_usage`
        lock, cleaning          locked by the process that evicts, or deletes the remains of dead writers
        fills/U.V.CHARGE        a block that is being written; locked while its writer lives
        objects/UUU/U.V         a block: its bytes, then its footer. U and V are hashes of URL and ETag

An object is cached in blocks of `BLOCK_BYTES`, each a file, whose U is a hash of the URL and the block's number. The
object's size is in another such file. An object that is no longer than a block is one file, whose U is of the URL.

A file gets its name under ``objects`` when its last byte is written, and never changes after that. The footer is at the
end of the file, so a truncated file has no footer.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from typing import NamedTuple

ROOT_NAME = "asyncloader-cache-1"
MARKER_NAME = "CACHEDIR.TAG"

# The first line is that of the Cache Directory Tagging Specification, https://bford.info/cachedir/.
MARKER = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# Objects that asyncloader keeps for training runs. They can be deleted at any time.\n"
)

MOST_ETAG = 1024
"""Maximum bytes of an ETag in UTF-8; an object with a longer one is not cached."""

BLOCK_BYTES = 1 << 20
"""A range is extended to whole blocks before it is read, so by less than a block at each end. These bytes take about as
long as one more request, as for `Transport.range_gap`; larger blocks would multiply the bytes of a reader that wants
few columns of a Parquet file.
"""

_AHEAD = 8  # blocks that a stream reads at a time: the bytes that a shard's reader fetches ahead by default

_MAGIC = b"ALcache1"
_BODY = struct.Struct(">8sQQIH16s")  # magic, created, size, crc of the object, length of the etag, hash of the URL
_END = struct.Struct(">I16x")  # crc of etag and body; the rest is no longer used
_FIXED = _BODY.size + _END.size

TAIL_SIZE = MOST_ETAG + _FIXED
"""The footer lies within this number of bytes from the end of the file."""

_BLOCK = 4096

_ENTRY_NAME = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{32}")
_FILL_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}\.([0-9]{1,18})")


def object_url(root: str, path: str) -> str:
    """Return the full URL of the object at `path` below the URL `root`; a query of the root is appended at the end."""
    base, mark, query = root.partition("?")
    return f"{base.rstrip('/')}/{path}{mark}{query}"


def hash_key(text: str) -> str:
    """Return 32 hexadecimal digits that represent a URL or an ETag in file names: 128 bits of BLAKE2b."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def block_key(url: str, block: int, size: int) -> str:
    """Return the hash that names a block of an object of `size` bytes; of an object that is no longer, its own hash.

    With the size, because a version that is named by a date alone may be of two objects.
    """
    return hash_key(url if size <= BLOCK_BYTES else f"{url}\0{BLOCK_BYTES}\0{block}\0{size}")


def block_length(block: int, size: int) -> int:
    """Return the length of a block of an object of `size` bytes: the last block may be shorter than `BLOCK_BYTES`."""
    return min(BLOCK_BYTES, size - block * BLOCK_BYTES)


def size_key(url: str) -> str:
    """Return the hash that names the record of an object's size, which is kept beside its blocks."""
    return hash_key(f"{url}\0size")


class Piece(NamedTuple):
    """The part of a range that lies in one block: `length` bytes from byte `offset` of the block on."""

    block: int
    offset: int
    length: int

    @property
    def start(self) -> int:
        """The first byte, counted from the object's start."""
        return self.block * BLOCK_BYTES + self.offset


def split_range(start: int, length: int) -> list[Piece]:
    """Split a range at the blocks' edges."""
    pieces: list[Piece] = []
    end = start + length
    while start < end:
        block, offset = divmod(start, BLOCK_BYTES)
        pieces.append(Piece(block, offset, min(BLOCK_BYTES - offset, end - start)))
        start += pieces[-1].length
    return pieces


def stream_step(start: int, stop: int | None, size: int) -> int:
    """Return where to end the part of a stream that begins at `start`: whole blocks, of which a reader that will
    probably close the stream at `stop` wants but one behind that.
    """
    block = start // BLOCK_BYTES
    after = block + _AHEAD
    if stop is not None:
        after = min(after, max(block + 1, -(-stop // BLOCK_BYTES)))
    return min(after * BLOCK_BYTES, size)


def entry_name(url_key: str, etag: str) -> str:
    """Return the file name of an object."""
    return f"{url_key}.{hash_key(etag)}"


def entry_url_key(name: str) -> str | None:
    """Return the hash of the URL in an object's file name; None for a name that the cache does not use."""
    match = _ENTRY_NAME.fullmatch(name)
    return match and match[1]


def fill_name(url_key: str, etag: str, charged: int) -> str:
    """Return the file name of an object while it is written; all writers of the same object use the same name."""
    return f"{entry_name(url_key, etag)}.{charged}"


def fill_charge(name: str) -> int | None:
    """Return the bytes that the file of `fill_name` will occupy; None for a name that the cache does not use."""
    match = _FILL_NAME.fullmatch(name)
    return match and int(match[1])


def storable_etag(etag: str) -> bool:
    """Return whether an ETag fits into a footer: not too long, and encodable (a header may hold any bytes)."""
    try:
        return len(etag.encode()) <= MOST_ETAG
    except UnicodeEncodeError:
        return False


def charge(size: int) -> int:
    """Return how much a file of `size` bytes counts towards the limit: whole blocks of 4 KiB, as on most disks."""
    return -(-size // _BLOCK) * _BLOCK


class CacheFooter(NamedTuple):
    """The footer that follows an object's bytes in its file.

    Attributes:
        url_key: `hash_key` of the object's URL.
        etag: the object's version, as reported by its store.
        size: bytes of the object.
        crc: CRC-32 of these bytes.
        created: when the file was written, nanoseconds since the epoch.
    """

    url_key: str
    etag: str
    size: int
    crc: int
    created: int

    def pack(self) -> bytes:
        """Return the footer as bytes."""
        etag = self.etag.encode()
        body = _BODY.pack(_MAGIC, self.created, self.size, self.crc, len(etag), bytes.fromhex(self.url_key))
        return etag + body + _END.pack(zlib.crc32(etag + body))

    @classmethod
    def parse(cls, tail: bytes, file_size: int) -> CacheFooter | None:
        """Parse the footer of a file of `file_size` bytes from its last `TAIL_SIZE` bytes (or all, if fewer).

        Return None if the file has no footer, the footer is damaged, or it does not match the file's length.
        """
        if len(tail) < _FIXED:
            return None
        (check,) = _END.unpack_from(tail, len(tail) - _END.size)
        magic, created, size, crc, length, url_key = _BODY.unpack_from(tail, len(tail) - _FIXED)
        start = len(tail) - _FIXED - length
        if magic != _MAGIC or start < 0 or file_size != size + length + _FIXED:
            return None
        if zlib.crc32(tail[start : len(tail) - _END.size]) != check:
            return None
        return cls(url_key.hex(), tail[start : start + length].decode(errors="replace"), size, crc, created)


class Stored(NamedTuple):
    """A file in the cache: `used` is the time of its last use in nanoseconds, `charged` its share of the limit in
    bytes.
    """

    used: int
    path: str
    charged: int


def choose_victims(files: Iterable[Stored], excess: int) -> Sequence[Stored]:
    """Choose the least recently used files that free at least `excess` bytes, or all files.

    Holds at most one more file in memory than it returns: a cache may have millions.
    """
    victims: list[tuple[int, str, int]] = []  # a heap, the most recently used on top
    total = 0
    for used, path, charged in files:
        heappush(victims, (-used, path, charged))
        total += charged
        while victims and total - victims[0][2] >= excess:
            total -= heappop(victims)[2]
    return [Stored(-used, path, charged) for used, path, charged in victims]
