"""Reads one version of an object from the local cache, or from the store and into the cache.

Data path: store -> [cached_object: cache_blocks, cache_store] -> reading, parquet_reading.

Everything is read by blocks: those that are missing are downloaded, neighbours together, and cached before the read
returns. A stream reads some blocks at a time, and the next ones while the consumer works on these.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from asyncloader.base.shielding import retrieve_error, wait_until_done
from asyncloader.transports.base import ObjectInfo, PinnedReader
from asyncloader.transports.cache_blocks import CachedBlocks, Claim
from asyncloader.transports.cache_layout import (
    BLOCK_BYTES,
    Piece,
    block_length,
    split_range,
    storable_etag,
    stream_step,
)
from asyncloader.transports.checks import check_range, check_start
from asyncloader.transports.errors import RangesIgnored, ReadFailed, SizeUnknown, TransportError
from asyncloader.transports.open_files import OpenFile, OpenFiles, use_ranges

if TYPE_CHECKING:
    from asyncloader.transports.cached import CachedTransport

_R = TypeVar("_R")

# How long the end of a read may wait for the store to confirm the object's version. After that it is not cached.
_CONFIRM_S = 10.0

# Blocks that are claimed at a time: each holds an open file.
_MOST_CLAIMED = 32

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
        self._fetched = False

    @cached_property
    def _blocks(self) -> CachedBlocks:
        """The version's blocks. Asked when the version is known."""
        assert self._version is not None
        return CachedBlocks(self.cached.store, self.cached.object_url(self.path), self._version)

    @cached_property
    def _name(self) -> str:
        """The name of the version's files in `OpenFiles`: a text, because it keeps its hash, and a tuple does not."""
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

    async def read_version(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges of the version that `find` has returned, like `Transport.read_ranges`.

        Raises:
            ReadFailed: a part of it is not cached, and the store has another version.
        """
        for start, length in ranges:
            check_range(self.path, self._blocks.version.size, start, length)
        split = [split_range(start, length) for start, length in ranges]
        found = await self._read_pieces({piece for pieces in split for piece in pieces})
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
        size = version.size

        def find(start: int, stop: int) -> tuple[bytes | OpenFile | None, int, int]:
            begin = start // BLOCK_BYTES * BLOCK_BYTES
            if stop > size:
                return None, start, stop
            if stop <= begin + BLOCK_BYTES:
                return self._open(start // BLOCK_BYTES, files), begin, min(begin + BLOCK_BYTES, size)
            parts: list[bytes] = []
            for piece in split_range(start, stop - start):
                file = self._open(piece.block, files)
                if file is None:
                    return None, start, stop
                parts.append(file.read(piece.offset, piece.length))
            return b"".join(parts), start, stop

        return use_ranges(ranges, use, find)

    async def stream_version(self, start: int, stop: int | None, chunk_size: int) -> AsyncGenerator[bytes, None]:
        """Read the version that `find` has returned in chunks, like `PinnedReader.stream`. Raises the error of
        `read_version`, too.
        """
        size = self._blocks.version.size
        check_start(self.path, size, start)
        asked = size if stop is None else min(stop, size)
        ahead: asyncio.Task[list[bytes]] | None = None
        try:
            while start < size:
                end = stream_step(start, stop, size)
                reading = ahead or asyncio.create_task(self._read_part(start, end))
                # What lies behind `stop` is read when it is asked for.
                ahead = None
                if end < asked:
                    ahead = asyncio.create_task(self._read_part(end, stream_step(end, stop, size)))
                try:
                    found = await reading
                except RangesIgnored:  # and the object cannot be cached
                    break
                for data in found:
                    for at in range(0, len(data), chunk_size):
                        yield data[at : at + chunk_size]
                        self.cached.pool.check_open()
                start = end
            else:
                return
        finally:
            if ahead is not None:
                ahead.cancel()
                await wait_until_done([ahead])
                retrieve_error(ahead)
        async with aclosing(self._source.stream(start=start, chunk_size=chunk_size)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _info(self) -> ObjectInfo:
        return await self._known() or await self._source.info()

    async def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        version = await self.find()
        return await (self._source.read_ranges(ranges) if version is None else self.read_version(ranges))

    async def _stream(self, start: int, stop: int | None, chunk_size: int) -> AsyncGenerator[bytes, None]:
        version = await self.find()
        given = (
            self._source.stream(start=start, stop=stop, chunk_size=chunk_size)
            if version is None
            else self.stream_version(start, stop, chunk_size)
        )
        async with aclosing(given) as chunks:
            async for chunk in chunks:
                yield chunk

    def _open(self, block: int, files: OpenFiles) -> OpenFile | None:
        name = (self._name, block)
        try:
            return files.find(name) or files.open(name, partial(self._blocks.open, block))
        except (OSError, ValueError):
            return None  # `read_ranges` has the same error, and decides what it means

    # --- versions

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

    async def _confirm(self) -> bool:
        """Return whether the object is still the same in the store."""
        return await self._ask() == self._version

    async def _ask(self) -> ObjectInfo | None:
        """Return the version that the store has now; None if the store fails, or does not answer in time."""
        try:
            async with asyncio.timeout(_CONFIRM_S):
                return await self.cached.inner.info(self.path)
        except (TransportError, TimeoutError):
            return None

    # --- blocks

    async def _read_part(self, start: int, end: int) -> list[bytes]:
        pieces = split_range(start, end - start)
        found = await self._read_pieces(pieces)
        return [found[piece] for piece in pieces]

    async def _read_pieces(self, pieces: Iterable[Piece]) -> dict[Piece, bytes]:
        """Return the bytes of pieces, from the cache or from the store, and cache the blocks that were missing.

        Of a server without byte ranges the whole object is cached before; RangesIgnored if it cannot be cached.
        """
        by_block: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in sorted(pieces):
            by_block[piece.block].append(piece)
        try:
            return await self._read_blocks(by_block)
        except RangesIgnored:
            if not self.cached.fills:
                raise
        async with self._fetching:  # the first read fetches it for all
            if not self._fetched:
                await self._fetch()
                self._fetched = True
        return await self._read_blocks(by_block)

    async def _fetch(self) -> None:
        """Download the object by one request, and cache its blocks, if the answer names their version."""
        waiting, block = bytearray(), 0
        async with aclosing(self._source.stream(chunk_size=BLOCK_BYTES)) as chunks:
            async for chunk in chunks:
                waiting += chunk
                whole = len(waiting) // BLOCK_BYTES
                if whole and self._source.etag == self.etag:
                    data = bytes(waiting[: whole * BLOCK_BYTES])
                    await self.cached.attempt(partial(self._blocks.put, data, block), filling=True)
                del waiting[: whole * BLOCK_BYTES]
                block += whole
        if waiting and self._source.etag == self.etag:
            await self.cached.attempt(partial(self._blocks.put, bytes(waiting), block), filling=True)

    async def _read_blocks(self, wanted: Mapping[int, Sequence[Piece]]) -> dict[Piece, bytes]:
        blocks, found = list(wanted), dict[Piece, bytes]()
        for at in range(0, len(blocks), _MOST_CLAIMED):
            await self._read_some({block: wanted[block] for block in blocks[at : at + _MOST_CLAIMED]}, found)
        return found

    async def _read_some(self, wanted: Mapping[int, Sequence[Piece]], found: dict[Piece, bytes]) -> None:
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + _WAIT_S, _FIRST_POLL_S
        while wanted:
            fill = self.cached.fills and loop.time() < until
            claiming = partial(self._blocks.claim, wanted, fill=fill)
            claim = await self.cached.attempt(claiming, Claim.abort) or Claim(refused=list(wanted))
            try:
                if claim.error is not None:
                    self.cached.on_disk_error(claim.error, filling=True)
                self.cached.cache_counts.hit(len({piece.block for piece in claim.found}))
                self.cached.cache_counts.save(sum(map(len, claim.found.values())))
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
                    await self.cached.pool.finish(claim.abort)
            wanted = {block: wanted[block] for block in claim.busy}

    async def _download(self, claim: Claim, wanted: Mapping[int, Sequence[Piece]], found: dict[Piece, bytes]) -> None:
        """Read the claimed blocks, and the wanted pieces of the refused ones; the transport joins neighbours."""
        fills, exact = list(claim.fills), [piece for block in claim.refused for piece in wanted[block]]
        self.cached.count_miss(len(fills) + len(claim.refused))
        ranges = [(block * BLOCK_BYTES, block_length(block, self._blocks.version.size)) for block in fills]
        data, proved = await self._read_source([*ranges, *((piece.start, piece.length) for piece in exact)])
        blocks = dict(zip(fills, data, strict=False))
        found.update(zip(exact, data[len(fills) :], strict=True))
        for block, whole in blocks.items():
            found.update((each, whole[each.offset : each.offset + each.length]) for each in wanted[block])
        if blocks and proved:
            await self.cached.attempt(partial(self._blocks.commit, claim, blocks), filling=True)

    async def _read_source(self, ranges: Sequence[tuple[int, int]]) -> tuple[Sequence[bytes], bool]:
        """Read ranges from the store; return also whether all bytes are known to be of this version.

        Raises:
            ReadFailed: the store has another version.
        """
        if not self._asked and await self._source.info() != self._version:
            await self.cached.attempt(self._blocks.forget)
            raise ReadFailed(
                f"{self.path!r} was cached in {self.cached.cache_dir!r} in part, and is another object in the store by "
                "now; the bytes of two versions are never mixed. Read it again",
                path=self.path,
            )
        self._asked = True
        data = await self._source.read_ranges(ranges)
        # The answers of some servers name no version: another request confirms it.
        return data, await self._confirm() if self._source.etag is None else self._source.etag == self.etag
