"""Reads one version of an object from the local cache, or from the store and into the cache.

Data path: store -> [cached_object: cache_store, cache_blocks] -> reading, parquet_reading.

A stream from an object's first byte to its last is copied to one file while the consumer reads it. All other reads go
by blocks: missing blocks are downloaded, neighbours together, and cached before the read returns. A file of the whole
object serves ranges, too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from asyncloader.transports.base import ObjectInfo, PinnedReader, gather_all
from asyncloader.transports.cache_blocks import CachedBlocks, Claim
from asyncloader.transports.cache_layout import (
    BLOCK_BYTES,
    Piece,
    block_length,
    group_neighbours,
    hash_key,
    split_range,
    storable_etag,
)
from asyncloader.transports.cache_store import CacheEntry, CacheFill
from asyncloader.transports.cache_tee import Tee
from asyncloader.transports.checks import check_range, check_start
from asyncloader.transports.errors import RangesIgnored, ReadFailed, SizeUnknown, TransportError
from asyncloader.transports.open_files import OpenFile, OpenFiles, use_ranges
from asyncloader.transports.ranges import cut_pieces, split_pieces

if TYPE_CHECKING:
    from asyncloader.transports.cached import CachedTransport

_R = TypeVar("_R")

# How long the end of a read may wait for the store to confirm the object's version. After that it is not cached.
_CONFIRM_S = 10.0

# Blocks that are claimed at a time: each holds an open file.
_MOST_CLAIMED = 32

# Blocks that a stream reads at a time. They have the bytes that a shard's reader fetches ahead by default.
_AHEAD = 8

# A read waits for another reader's download until it ends or its process dies, but not longer than this: then it reads
# the bytes from the store, and does not cache them. Other processes send no event, so it polls.
_WAIT_S = 30.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05


class CachedObject(PinnedReader):
    """Parts of one object. The arguments are those of `PinnedReader`."""

    def __init__(self, transport: CachedTransport, path: str) -> None:
        super().__init__(transport, path)
        self.cached = transport
        self._source = transport.inner.pinned(path)
        # Held while the version is determined: of two first reads at once, both must read the same version.
        self._looking = asyncio.Lock()
        self._looked = False
        self._version: ObjectInfo | None = None  # None: it cannot be cached
        self._asked = False  # the store has confirmed that it has this version
        self._fetching = asyncio.Lock()  # held while the whole object is fetched for a read of a part

    @cached_property
    def local_name(self) -> str:
        """The name of the version's files in `OpenFiles`. Asked when the version is known."""
        # A text, because it keeps its hash, and a tuple does not.
        return repr((self.cached.object_url(self.path), self._version))

    @property
    def etag(self) -> str | None:
        """The version of the bytes, like `PinnedReader.etag`."""
        return self._source.etag if self._version is None else self._version.etag

    @property
    def size(self) -> int | None:
        """Bytes of the object, like `PinnedReader.size`."""
        return self._source.size if self._version is None else self._version.size

    async def replaced(self) -> bool:
        """Return whether the store now has another version than the version that is read here."""
        return await self._ask() not in {None, self._version}

    async def find(self) -> ObjectInfo | None:
        """Return the version that is read; None if it cannot be cached.

        It is determined once: another version may be cached later.
        """
        version = await self._known()
        if version is None:
            self.cached.count_miss()
        return version

    async def read_version(self, version: ObjectInfo, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges of a version that `find` has returned, like `Transport.read_ranges`.

        Raises:
            ReadFailed: a part of it is not cached, and the store has another version.
        """
        for start, length in ranges:
            check_range(self.path, version.size, start, length)
        reading = _Reading(self, version)
        split = [split_range(start, length) for start, length in ranges]
        found = await self._read_pieces(reading, version, {piece for pieces in split for piece in pieces})
        reading.count()
        return [found[pieces[0]] if len(pieces) == 1 else b"".join(map(found.__getitem__, pieces)) for pieces in split]

    @property
    def local(self) -> bool:
        """Whether `use_local` may find something: the version that is read is known, and the cache is read."""
        return self._version is not None and self.cached.serves

    def use_local(
        self,
        ranges: Sequence[tuple[int, int]],
        use: Callable[[bytes | OpenFile, int, int, int], _R],
        files: OpenFiles,
    ) -> list[_R | None]:
        """Call a function with the bytes of each range that the cache's files have, without the event loop: blocks, and
        is called in a thread.

        Args:
            ranges: as of `use_ranges`.
            use: as there.
            files: keeps the files that are read.

        Returns:
            For each range what `use` returned, or None: the range must be read by `read_ranges`, because a block of it
            is not cached, or cannot be read, or the object has no such range.

        Raises:
            The errors of `use`, except EntryLost.
        """
        version = self._version
        if version is None or not self.cached.serves:
            return [None] * len(ranges)
        return use_ranges(ranges, use, _Search(self, version, files).find)

    async def stream_version(
        self, version: ObjectInfo, start: int, stop: int | None, chunk_size: int
    ) -> AsyncGenerator[bytes, None]:
        """Read a version that `find` has returned in chunks, like `PinnedReader.stream`. Raises the error of
        `read_version`, too.
        """
        check_start(self.path, version.size, start)
        entry = await self.cached.attempt(self.blocks_of(version).open_whole, CacheEntry.close)
        if entry is not None:
            given = self._stream_entry(version, entry, start, chunk_size)
        elif start == 0 and stop is None:
            self.cached.count_miss()
            given = self._stream_filling(version, chunk_size)
        else:
            given = self._stream_blocks(version, start, stop, chunk_size)
        async with aclosing(given) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _info(self) -> ObjectInfo:
        return await self._known() or await self._source.info()

    async def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        version = await self.find()
        return await (self._source.read_ranges(ranges) if version is None else self.read_version(version, ranges))

    async def _stream_to(self, start: int, stop: int | None, chunk_size: int) -> AsyncGenerator[bytes, None]:
        version = await self.find()
        given = (
            self._source.stream(start=start, stop=stop, chunk_size=chunk_size)
            if version is None
            else self.stream_version(version, start, stop, chunk_size)
        )
        async with aclosing(given) as chunks:
            async for chunk in chunks:
                yield chunk

    def blocks_of(self, version: ObjectInfo) -> CachedBlocks:
        """Return the object's blocks in the cache."""
        return CachedBlocks(self.cached.store, self.cached.object_url(self.path), version)

    async def _known(self) -> ObjectInfo | None:
        async with self._looking:
            if not self._looked:
                self._version = await self._look()
                self._looked = True
        return self._version

    async def _look(self) -> ObjectInfo | None:
        if not self.cached.serves:
            return None
        if not self.cached.revalidate and (newest := await self.cached.find_newest(self.path)) is not None:
            return newest
        try:
            info = await self._source.info()
        except SizeUnknown:
            return None
        self._asked = True
        return None if info.etag is None or not storable_etag(info.etag) else info

    # --- streams

    async def _stream_entry(
        self, version: ObjectInfo, entry: CacheEntry, start: int, chunk_size: int
    ) -> AsyncGenerator[bytes, None]:
        counts = self.cached.cache_counts
        counts.hit()
        position = start
        try:
            while position < entry.size:
                length = min(chunk_size, entry.size - position)
                chunk = await self.cached.attempt(partial(entry.read, position, length))
                if chunk is None:
                    break
                counts.save(length)
                position += length
                yield chunk
            else:
                return
        finally:
            await self.cached.pool.finish(entry.close)
        # The disk failed in the middle. The rest is read from the store, if the object is unchanged there.
        async with aclosing(self._stream_blocks(version, position, None, chunk_size)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream_blocks(
        self, version: ObjectInfo, start: int, stop: int | None, chunk_size: int
    ) -> AsyncGenerator[bytes, None]:
        reading = _Reading(self, version)
        try:
            while start < version.size:
                block = start // BLOCK_BYTES
                after = block + _AHEAD
                if stop is not None:  # after it, one block at a time: the reader rarely needs a second block
                    after = min(after, max(block + 1, -(-stop // BLOCK_BYTES)))
                pieces = split_range(start, min(after * BLOCK_BYTES, version.size) - start)
                try:
                    found = await self._read_pieces(reading, version, pieces)
                except RangesIgnored:  # and the object cannot be cached
                    async with aclosing(self._source.stream(start=start, chunk_size=chunk_size)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    return
                for piece in pieces:
                    data = found.pop(piece)
                    start += len(data)
                    for at in range(0, len(data), chunk_size):
                        yield data[at : at + chunk_size]
        finally:
            reading.count()

    async def _read_pieces(
        self, reading: _Reading, version: ObjectInfo, pieces: Collection[Piece]
    ) -> dict[Piece, bytes]:
        """Read pieces. Without byte ranges the whole object is cached before; RangesIgnored if it cannot be cached."""
        try:
            return await reading.read(pieces)
        except RangesIgnored:
            if not self.cached.fills:
                raise
        async with self._fetching:  # the first read fetches it for all
            entry = await self.cached.attempt(self.blocks_of(version).open_whole, CacheEntry.close)
            if entry is not None:
                await self.cached.pool.finish(entry.close)
            else:
                async with aclosing(self._stream_filling(version, BLOCK_BYTES)) as chunks:
                    async for _ in chunks:
                        pass
        return await reading.read(pieces)

    async def _stream_filling(self, version: ObjectInfo, chunk_size: int) -> AsyncGenerator[bytes, None]:
        cached, source = self.cached, self._source
        fill: CacheFill | None = None
        if version.size and cached.fills:
            key = hash_key(cached.object_url(self.path))
            begin = partial(cached.store.begin, key, str(version.etag), version.size)
            fill = await cached.attempt(begin, CacheFill.abort, filling=True)
        tee = Tee(fill, cached.pool, partial(cached.on_disk_error, filling=True))
        try:
            async with aclosing(source.stream(chunk_size=chunk_size)) as chunks:
                received = 0
                chunk = await anext(chunks, b"")
                while chunk:
                    received += len(chunk)
                    await tee.add(chunk)
                    after: bytes | None = None
                    if tee.open and received >= version.size:
                        # Kept before the last chunk is returned: the reader may know that it is the last, and close
                        # the stream.
                        after = await anext(chunks, b"")
                        # A store may answer from several copies with different versions: if this answer
                        # names a version, that version counts.
                        if not after and source.etag in {None, version.etag} and await self._confirm(version):
                            await tee.keep()
                    yield chunk
                    chunk = await anext(chunks, b"") if after is None else after
        finally:
            await tee.drop()

    # --- versions

    async def read_source(
        self, version: ObjectInfo, runs: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]
    ) -> tuple[list[Sequence[bytes]], Sequence[bytes], bool]:
        """Read from the store, all at the same time.

        Args:
            version: of the object.
            runs: ranges that are read by one request each.
            ranges: further ranges, of which neighbours are read by one request.

        Returns:
            The runs, each in the pieces in which it arrived; the ranges; and whether all bytes are known to be of this
            version.

        Raises:
            ReadFailed: the store has another version.
        """
        if not self._asked and await self._source.info() != version:
            await self.cached.attempt(self.blocks_of(version).forget)
            raise ReadFailed(
                f"{self.path!r} was cached in {self.cached.cache_dir!r} in part, and is another object in the store by "
                "now; the bytes of two versions are never mixed. Read it again",
                path=self.path,
            )
        self._asked = True
        reads = [self._source.read_pieces(*run) for run in runs]
        found = await gather_all([*reads, self._source.read_ranges(ranges)] if ranges else reads)
        etag = self._source.etag
        # The answers of some servers name no version: another request confirms it.
        proved = await self._confirm(version) if etag is None else etag == version.etag
        return found[: len(runs)], found[-1] if ranges else (), proved

    async def _confirm(self, version: ObjectInfo) -> bool:
        """Return whether the object is still the same in the store."""
        return await self._ask() == version

    async def _ask(self) -> ObjectInfo | None:
        """Return the version that the store has now; None if the store fails, or does not answer in time."""
        try:
            async with asyncio.timeout(_CONFIRM_S):
                return await self.cached.inner.info(self.path)
        except (TransportError, TimeoutError):
            return None


class _Search:
    """One search for ranges of a version in the cache's files."""

    def __init__(self, owner: CachedObject, version: ObjectInfo, files: OpenFiles) -> None:
        self._name = owner.local_name
        self._blocks = owner.blocks_of(version)
        self._size = version.size
        self._files = files
        self._whole = files.find((self._name, None))
        self._looked = self._whole is not None  # for a file of the whole object

    def find(self, start: int, stop: int) -> tuple[bytes | OpenFile | None, int, int]:
        """Return what has the object's bytes from `start` to `stop`, and from where to where it has them; None: no file
        has these bytes.

        Raises:
            EntryLost: a file cannot be read.
        """
        if stop > self._size:
            return None, start, stop
        if self._whole is None:
            block = start // BLOCK_BYTES
            begin = block * BLOCK_BYTES
            if stop > begin + BLOCK_BYTES:
                data = self._join(split_range(start, stop - start))
                if data is not None:
                    return data, start, stop
            else:
                file = self._find(block)
                if self._whole is None:
                    return file, begin, min(begin + BLOCK_BYTES, self._size)
        # It may have been found just now.
        return (None, start, stop) if self._whole is None else (self._whole, 0, self._size)

    def _join(self, pieces: Sequence[Piece]) -> bytes | None:
        parts: list[bytes] = []
        for piece in pieces:
            file = self._find(piece.block)
            if file is None:
                return None
            parts.append(file.read(piece.offset, piece.length))
        return b"".join(parts)

    def _find(self, block: int) -> OpenFile | None:
        """Return a block's file. If it is not open yet, a file of the whole object is looked for first."""
        name = (self._name, block)
        file = self._files.find(name)
        try:
            if file is None and not self._looked:
                self._looked = True
                if self._size > BLOCK_BYTES:
                    self._whole = self._files.open((self._name, None), self._blocks.open_whole)
            if file is None and self._whole is None:
                file = self._files.open(name, partial(self._blocks.open_block, block))
        except (OSError, ValueError):
            pass  # `read_ranges` has the same error, and decides what it means
        return file


class _Reading:
    """One read by blocks. It counts as a hit if all of its bytes come from the cache."""

    def __init__(self, owner: CachedObject, version: ObjectInfo) -> None:
        self._owner = owner
        self._cached = owner.cached
        self._version = version
        self._blocks = owner.blocks_of(version)
        self._missed = False

    def count(self) -> None:
        """Count a hit, unless a miss was counted; called at the end."""
        if not self._missed:
            self._cached.cache_counts.hit()

    async def read(self, pieces: Iterable[Piece]) -> dict[Piece, bytes]:
        """Return the bytes of pieces, from the cache or from the store, and cache the blocks that were missing."""
        by_block: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in sorted(pieces):
            by_block[piece.block].append(piece)
        blocks, found = list(by_block), dict[Piece, bytes]()
        for at in range(0, len(blocks), _MOST_CLAIMED):
            await self._read_some({block: by_block[block] for block in blocks[at : at + _MOST_CLAIMED]}, found)
        return found

    async def _read_some(self, wanted: Mapping[int, Sequence[Piece]], found: dict[Piece, bytes]) -> None:
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + _WAIT_S, _FIRST_POLL_S
        while wanted:
            fill = self._cached.fills and loop.time() < until
            claiming = partial(self._blocks.claim, wanted, fill=fill)
            claim = await self._cached.attempt(claiming, Claim.abort) or Claim(refused=list(wanted))
            try:
                if claim.error is not None:
                    self._cached.on_disk_error(claim.error, filling=True)
                self._cached.cache_counts.save(sum(map(len, claim.found.values())))
                found.update(claim.found)
                # While this read holds claims, it does not wait for other readers: so two readers, each with a
                # claim on a block that the other needs, do not wait for each other for ever.
                if claim.fills or claim.refused:
                    await self._download(claim, wanted, found)
                elif claim.busy:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_POLL_S)
            finally:
                if claim.fills:
                    await self._cached.pool.finish(claim.abort)
            wanted = {block: wanted[block] for block in claim.busy}

    async def _download(self, claim: Claim, wanted: Mapping[int, Sequence[Piece]], found: dict[Piece, bytes]) -> None:
        """Read the claimed blocks, and the wanted pieces of the refused ones; the transport joins neighbours."""
        if not self._missed:
            self._missed = True
            self._cached.count_miss()
        exact = [piece for block in claim.refused for piece in wanted[block]]
        lengths = {block: block_length(block, self._version.size) for block in claim.fills}
        groups = group_neighbours(claim.fills)
        runs = [(group[0] * BLOCK_BYTES, sum(map(lengths.__getitem__, group))) for group in groups]
        read, given, proved = await self._owner.read_source(
            self._version, runs, [(piece.start, piece.length) for piece in exact]
        )
        found.update(zip(exact, given, strict=True))
        blocks: dict[int, list[memoryview]] = {}
        for group, pieces in zip(groups, read, strict=True):
            blocks.update(zip(group, split_pieces(pieces, map(lengths.__getitem__, group)), strict=True))
        for block, parts in blocks.items():
            for piece in wanted[block]:
                found[piece] = cut_pieces(parts, piece.offset, piece.length)
        if blocks and proved:
            await self._cached.attempt(partial(self._blocks.commit, claim, blocks), filling=True)
