"""Finds the blocks of one version of an object in the local cache, claims missing blocks for download, and writes them.

Data path: cached_object -> a thread -> [cache_blocks] -> cache_store: files.

A reader claims the blocks that are missing, and downloads them; other readers that want these blocks, in this process
or in others, wait until they are written. A claim is a lock on the block's unfinished file, so it ends with its
process, however that ends. A reader holds it during a request and never while a consumer works.

All functions block and are called in threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.cache_layout import BLOCK_BYTES, Piece, block_key, block_length, hash_key, size_key
from asyncloader.transports.cache_store import BeingWritten, CacheEntry, CacheFill, CacheStore, EntryLost


@dataclass(slots=True)
class Claim:
    """The state of the blocks that a reader wants.

    Attributes:
        found: the pieces that are cached, with their bytes.
        fills: the blocks that the caller has to download, and either `CachedBlocks.commit` or `abort`.
        busy: the blocks that another writer has claimed.
        refused: the blocks that cannot be cached at the moment: there is no room, or the disk failed.
        error: the disk's error when a block was claimed.
    """

    found: dict[Piece, bytes] = field(default_factory=dict)
    fills: dict[int, CacheFill] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    error: OSError | None = None

    def abort(self) -> None:
        """Release the blocks that are not written yet."""
        for fill in self.fills.values():
            fill.abort()


class CachedBlocks:
    """The blocks of one version of an object.

    Args:
        store: the cache.
        url: of the object, as in `object_url`.
        version: the object's size and its ETag, which is not None.
    """

    def __init__(self, store: CacheStore, url: str, version: ObjectInfo) -> None:
        assert version.etag is not None
        self.version = version
        self._store = store
        self._url = url
        self._size = version.size
        self._etag = version.etag

    def open(self, block: int) -> CacheEntry | None:
        """Open the file of a block; None if it is not cached."""
        entry = self._store.open(block_key(self._url, block, self._size), self._etag)
        if entry is not None and entry.size != block_length(block, self._size):
            entry.close()
            return None
        return entry

    def claim(self, wanted: Mapping[int, Sequence[Piece]], *, fill: bool) -> Claim:
        """Read the pieces that are cached, and claim the other blocks if `fill`.

        Raises:
            OSError: the cache cannot be read.
        """
        claim = Claim()
        try:
            for block, pieces in wanted.items():
                # Once more after the claim: another reader may have cached the block between the two.
                if not (
                    self._take(block, pieces, claim.found)
                    or self._claim_block(block, claim, fill=fill and claim.error is None)
                    or self._take(block, pieces, claim.found)
                ):
                    claim.refused.append(block)
        except BaseException:
            claim.abort()
            raise
        return claim

    def commit(self, claim: Claim, data: Mapping[int, bytes]) -> None:
        """Write the blocks that were claimed. OSError: the disk is full or failed; the other blocks are released."""
        try:
            self._put_size()
            for block, fill in claim.fills.items():
                fill.commit(data[block])
        finally:
            claim.abort()

    def put(self, data: bytes, first: int = 0) -> None:
        """Write the blocks from number `first` on that `data` has. OSError: the disk is full or failed."""
        self._put_size()
        for block, start in zip(count(first), range(0, len(data), BLOCK_BYTES), strict=False):
            part = memoryview(data)[start : start + BLOCK_BYTES]
            self._store.put(block_key(self._url, block, self._size), self._etag, part)

    def forget(self) -> None:
        """Delete the record of this version's size: the store has another version now."""
        self._store.forget(size_key(self._url), self._etag)

    def _put_size(self) -> None:
        # Before the blocks: readers that do not ask the store find a version by it.
        if self._size > BLOCK_BYTES:
            self._store.put(size_key(self._url), self._etag, str(self._size).encode())

    def _take(self, block: int, pieces: Sequence[Piece], found: dict[Piece, bytes]) -> bool:
        entry = self.open(block)
        if entry is None:
            return False
        try:
            found.update([(piece, entry.read(piece.offset, piece.length)) for piece in pieces])
        except EntryLost:
            return False
        finally:
            entry.close()
        return True

    def _claim_block(self, block: int, claim: Claim, *, fill: bool) -> bool:
        """Claim a block for this read, or note that another has claimed it. False: neither."""
        key, length = block_key(self._url, block, self._size), block_length(block, self._size)
        claimed: CacheFill | None = None
        if fill:
            try:
                claimed = self._store.claim(key, self._etag, length)
            except BeingWritten:
                claim.busy.append(block)
                return True
            except OSError as error:
                claim.error = error
        if claimed is not None:
            claim.fills[block] = claimed
        return claimed is not None


def is_known(store: CacheStore, url: str) -> bool:
    """Return whether blocks of any version of an object are cached."""
    return store.has(hash_key(url)) or store.has(size_key(url))


def find_newest(store: CacheStore, url: str) -> ObjectInfo | None:
    """Return the version of an object that was cached last; None if none is cached."""
    found: list[tuple[int, ObjectInfo]] = []
    for key in (hash_key(url), size_key(url)):
        entry = store.open_newest(key)
        if entry is None:
            continue
        try:
            size = entry.size if key == hash_key(url) else int(entry.read(0, entry.size))
        except EntryLost:
            continue
        finally:
            entry.close()
        found.append((entry.created, ObjectInfo(size, entry.etag)))
    return max(found)[1] if found else None
