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
        self._store = store
        self._url = url
        self._size = version.size
        self._etag = version.etag

    def open_whole(self) -> CacheEntry | None:
        """Open the copy of the whole object; None if it is not cached as a whole."""
        return self._open(hash_key(self._url), self._size)

    def open_block(self, block: int) -> CacheEntry | None:
        """Open the file of a block; None if it is not cached."""
        return self._open(block_key(self._url, block, self._size), block_length(block, self._size))

    def claim(self, wanted: Mapping[int, Sequence[Piece]], *, fill: bool) -> Claim:
        """Read the pieces that are cached, from a copy of the whole object if one exists, and claim the other blocks if
        `fill`.

        Raises:
            OSError: the cache cannot be read.
        """
        claim = Claim()
        whole = self.open_whole() if self._size > BLOCK_BYTES else None
        try:
            for block, pieces in wanted.items():
                if not (_take(whole, pieces, 0, claim.found) or self._take_block(block, pieces, claim.found)):
                    self._claim_block(block, claim, fill=fill and claim.error is None)
                    # Another writer may have finished the block after it was found missing and before it was claimed.
                    if block in claim.refused and self._take_block(block, pieces, claim.found):
                        claim.refused.remove(block)
        except BaseException:
            claim.abort()
            raise
        finally:
            if whole is not None:
                whole.close()
        return claim

    def commit(self, claim: Claim, data: Mapping[int, Sequence[memoryview]]) -> None:
        """Write the blocks that were claimed, each in any pieces. OSError: the disk is full or failed; the other blocks
        are released.
        """
        try:
            # The size is written before the blocks: readers that do not ask the store find a version by it.
            if self._size > BLOCK_BYTES and not self._store.holds(size_key(self._url), self._etag):
                self._store.put(size_key(self._url), self._etag, str(self._size).encode())
            for block, fill in claim.fills.items():
                fill.commit(*data[block])
        finally:
            claim.abort()

    def forget(self) -> None:
        """Delete the record of this version's size: the store has another version now."""
        self._store.forget(size_key(self._url), self._etag)

    def _open(self, key: str, size: int) -> CacheEntry | None:
        entry = self._store.open(key, self._etag)
        if entry is not None and entry.size != size:
            entry.close()
            return None
        return entry

    def _take_block(self, block: int, pieces: Sequence[Piece], found: dict[Piece, bytes]) -> bool:
        entry = self.open_block(block)
        try:
            return _take(entry, pieces, block * BLOCK_BYTES, found)
        finally:
            if entry is not None:
                entry.close()

    def _claim_block(self, block: int, claim: Claim, *, fill: bool) -> None:
        key, length = block_key(self._url, block, self._size), block_length(block, self._size)
        claimed: CacheFill | None = None
        if fill:
            try:
                claimed = self._store.claim(key, self._etag, length)
            except BeingWritten:
                claim.busy.append(block)
                return
            except OSError as error:
                claim.error = error
        if claimed is None:
            claim.refused.append(block)
        else:
            claim.fills[block] = claimed


def find_newest(store: CacheStore, url: str) -> ObjectInfo | None:
    """Return the version of an object that was cached last, whole or in blocks; None if none is cached."""
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


def _take(entry: CacheEntry | None, pieces: Sequence[Piece], begins: int, found: dict[Piece, bytes]) -> bool:
    """Read pieces from a file whose first byte is byte `begins` of the object. False: `entry` is None, or is lost."""
    if entry is None:
        return False
    try:
        found.update([(piece, entry.read(piece.start - begins, piece.length)) for piece in pieces])
    except EntryLost:
        return False
    return True
