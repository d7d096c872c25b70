"""Writes shards to a store: assembles, compresses and uploads several at a time, and records those that are complete.

Data path: encoded samples -> shard_cutting -> [shard_writing] -> transport -> store.

A shard is held in memory until the store has it, and becomes visible whole. The index beside the shards (`shard_index`)
is written first, again while shards become complete, and at the end: so a writer that was killed can be told from a
foreign one, and its complete shards from others.

Beside each shard that has no table of its own is the index of its samples, for random access (`sample_index`): the
writer knows where they are, and a reader would have to read the whole shard. It is written before the shard is
recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from asyncloader.errors import ShardWriteError
from asyncloader.formats.compressed import compressor
from asyncloader.formats.encoder import EncodedSamples, RecordEncoder, ShardEncoder
from asyncloader.formats.mds_writer import MdsEncoder, MdsFile, mds_index
from asyncloader.remote.discovery import INDEX
from asyncloader.remote.sample_index import SampleIndex, format_name, index_name
from asyncloader.remote.sample_index import dump_index as dump_samples
from asyncloader.remote.shard_cutting import CutShard, ShardCutter
from asyncloader.remote.shard_index import (
    MAX_INDEX_BYTES,
    ShardIndex,
    ShardNames,
    ShardRecord,
    dump_index,
    parse_index,
)
from asyncloader.remote.shard_sizes import for_each
from asyncloader.remote.stores import Stores, scheme_of
from asyncloader.transports import ObjectNotFound, Transport
from asyncloader.transports.base import gather_all
from asyncloader.transports.blocking import BlockingPool

MOST_AT_ONCE = 32
"""Most shards that are uploaded at the same time, however small."""

CHECKS = 32
"""Most shards of an earlier run that are checked at the same time."""


class WrittenShard(NamedTuple):
    """A shard in the store.

    Attributes:
        url: its URL.
        samples: number of samples.
        bytes: of the object.
        sha256: of these bytes, in hexadecimal.
    """

    url: str
    samples: int
    bytes: int
    sha256: str


class ShardWriter:
    """Writes the shards of one data set.

    Args:
        names: of the shards.
        stores: find the transport.
        encoder: of the samples.
        max_bytes: of a shard, before compression.
        max_samples: of a shard; None: no limit.
        buffer_bytes: of the shards in memory, the shard that grows included; a single shard may have more.
        settings: further values that must be the same to continue after a killed writer; plain JSON values.
        overwrite: delete the shards of an earlier run.
    """

    def __init__(
        self,
        names: ShardNames,
        stores: Stores,
        encoder: ShardEncoder,
        *,
        max_bytes: int,
        max_samples: int | None,
        buffer_bytes: int,
        settings: Mapping[str, Any],
        overwrite: bool,
    ) -> None:
        self._names = names
        self._stores = stores
        self._encoder = encoder
        self._compress = None if names.format.compression is None else compressor(names.format.compression)
        self._max_bytes = max_bytes
        self._max_samples = max_samples
        self._buffer_bytes = buffer_bytes
        about = {"max_bytes": max_bytes, "max_samples": max_samples, "columns": encoder.describe(), **settings}
        self._settings = json.loads(json.dumps({"format": names.format, **about}))
        self._overwrite = overwrite
        self._earlier: Mapping[int, ShardRecord] = {}  # of the run that this one continues or repeats
        self._done: dict[int, ShardRecord] = {}
        self._pool = BlockingPool("shards", max(2, min(8, os.cpu_count() or 1)))
        self._uploading = self._uploaded_bytes = 0
        self._freed = asyncio.Event()
        self._unsaved = False
        self._saving = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None

    async def open(self, *, skip: bool) -> ShardCutter:
        """Look for an earlier run, and begin. Return what the samples are cut by; it counts those that are skipped.

        Args:
            skip: the samples of complete shards need not be encoded again, because they are those of a map dataset.

        Raises:
            FileExistsError: the store has shards of these names that this writer would not continue.
            TransportError: the store cannot be read or written.
        """
        transport, path = self._find(self._names.index_name)
        if type(transport).write is Transport.write:
            # Its error says that it is for reading only; a web server would first be asked for what it has.
            await transport.write(path, [])
        index, stored = await self._read_index(), await self._stored()
        if self._overwrite:
            await self._delete_all(stored)
        elif index is not None:
            await self._go_on(index, stored, skip)
        elif stored:
            raise FileExistsError(
                f"{self._url(next(iter(stored)))} exists, and {len(stored) - 1} others, without an index of "
                "write_shards: choose another name, or delete them by overwrite=True"
            )
        await self._write_index(complete=False)
        shard, sample = len(self._done), sum(each.samples for each in self._done.values())
        return ShardCutter(self._encoder, self._max_bytes, self._max_samples, shard=shard, sample=sample)

    async def write(self, batches: AsyncGenerator[EncodedSamples, None], cutter: ShardCutter) -> list[WrittenShard]:
        """Write all samples, as `cutter` of `open` cuts them, and the index.

        Raises:
            ShardWriteError: a sample cannot be written; the shards before it are.
            FileExistsError: a shard of the earlier run has other samples.
            TransportError: the store failed.
            Exception: the error of `batches`.
        """
        failure: Exception | None = None
        try:
            try:
                async with asyncio.TaskGroup() as self._group, aclosing(batches):
                    try:
                        async for encoded in batches:
                            for shard in cutter.add(encoded):
                                await self._begin(shard)
                            if encoded.failure is not None:
                                _, key, text = encoded.failure
                                raise ShardWriteError(text, number=cutter.samples, key=key)
                        for shard in cutter.end():
                            await self._begin(shard)
                    except Exception as error:
                        # After the group: the shards before it are finished, and need not be written again.
                        failure = error
            except BaseExceptionGroup as group:
                failure = failure or next((each for each in group.exceptions if isinstance(each, Exception)), None)
                if failure is None:
                    raise
            if failure is not None:
                raise failure
        finally:
            self._group = failure = None  # an error's traceback refers to this frame
            await self._pool.aclose()
        if beyond := sorted(self._earlier.keys() - self._done.keys()):
            raise FileExistsError(
                f"{self._url(self._names.name(beyond[0]))} was written by an earlier run, from more samples than there "
                "are now: choose another name, or delete all by overwrite=True"
            )
        await self._write_index(complete=True)
        found = [self._done[number] for number in range(len(self._done))]
        return [WrittenShard(self._url(each.name), each.samples, each.bytes, each.sha256) for each in found]

    # ------------------------------------------------------------------------------------------------- one shard

    async def _begin(self, shard: CutShard) -> None:
        """Start to write a shard, as soon as the memory allows it."""
        # By the limit, not by the shard's size: the next shard grows while this one is uploaded.
        while self._uploading and (
            self._uploaded_bytes + shard.size + self._max_bytes > self._buffer_bytes or self._uploading >= MOST_AT_ONCE
        ):
            self._freed.clear()
            await self._freed.wait()
        assert self._group is not None
        self._uploading += 1
        self._uploaded_bytes += shard.size
        self._group.create_task(self._finish(shard), name=f"asyncloader-shard-{shard.number}")

    async def _finish(self, shard: CutShard) -> None:
        try:
            await self._write(shard)
        finally:
            self._uploading -= 1
            self._uploaded_bytes -= shard.size
            self._freed.set()
        self._unsaved = True
        async with self._saving:
            if self._unsaved:  # once for all shards that became complete meanwhile
                self._unsaved = False
                await self._write_index(complete=False)

    async def _write(self, shard: CutShard) -> None:
        """Write a shard, unless the earlier run has written it."""
        name = self._names.name(shard.number)
        pieces, size, digest = await self._pool.run(partial(self._assemble, shard))
        earlier = self._earlier.get(shard.number)
        if earlier is not None and earlier.sha256 != digest:
            raise FileExistsError(
                f"{self._url(name)} exists with other samples than those from number {shard.first:,} on: choose "
                "another name, or delete all by overwrite=True"
            )
        if earlier is not None and await self._is_stored(earlier):
            self._done[shard.number] = earlier
            return
        transport, path = self._find(name)
        etag = (await transport.write(path, pieces)).etag
        await self._write_samples(name, shard, size, etag)
        self._done[shard.number] = ShardRecord(name, shard.samples, size, shard.size, digest, etag)

    async def _write_samples(self, name: str, shard: CutShard, size: int, etag: str | None) -> None:
        """Write the index of a shard's samples, unless the shard has a table of its own."""
        if not isinstance(self._encoder, RecordEncoder):
            return
        # A local file's version is its time of modification, which ends when the files are copied to a store.
        local = self._stores.transport is None and scheme_of(self._url(name)) == "file"
        edges = np.zeros(shard.samples + 1, np.int64)
        sizes = [part.encoded.sizes[part.first : part.stop] for part in shard.parts]
        np.cumsum(np.concatenate(sizes), out=edges[1:])
        index = SampleIndex(format_name(self._names.format), size, None if local else etag, edges, whole=True)
        await self._put(index_name(name), dump_samples(index))

    def _assemble(self, shard: CutShard) -> tuple[Sequence[Buffer], int, str]:
        """Return the object's bytes, their number, and their digest. In a thread."""
        pieces = self._encoder.assemble(shard.parts)
        if self._compress is not None:
            pieces = self._compress(pieces)
        digest, size = hashlib.sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += memoryview(piece).nbytes
        return pieces, size, digest.hexdigest()

    # ------------------------------------------------------------------------------------------------- the index

    async def _write_index(self, *, complete: bool) -> None:
        if complete and isinstance(self._encoder, MdsEncoder):
            each = (self._done[number] for number in range(len(self._done)))
            files = [MdsFile(one.name, one.samples, one.size, one.bytes) for one in each]
            ending = self._names.after.rpartition(".")[2] if self._compress else None
            await self._put(INDEX, mds_index(self._encoder, files, ending, self._max_bytes))
        shards = self._done if complete else {**self._earlier, **self._done}
        await self._put(self._names.index_name, dump_index(ShardIndex(complete, self._settings, shards)))

    async def _read_index(self) -> ShardIndex | None:
        transport, path = self._find(self._names.index_name)
        try:
            data = await transport.read(path, max_bytes=MAX_INDEX_BYTES)
        except ObjectNotFound:
            return None
        try:
            return parse_index(data, self._names)
        except ValueError as error:
            if self._overwrite:
                return None
            raise FileExistsError(
                f"{self._url(self._names.index_name)} exists, and is no index of these shards: {error}; choose another "
                "name, or delete it by overwrite=True"
            ) from None

    # --------------------------------------------------------------------------------------------- an earlier run

    async def _delete_all(self, stored: Mapping[str, None]) -> None:
        # The index first: it must not describe shards that are deleted, or other shards of the same names.
        for name in (self._names.index_name, *((INDEX,) if self._is_mds else ()), *stored):
            await self._delete(name)
        if isinstance(self._encoder, RecordEncoder):
            # One of a shard that is gone would be refused by the readers of another shard of this name.
            await gather_all(self._delete(index_name(name)) for name in stored)

    async def _go_on(self, index: ShardIndex, stored: Mapping[str, None], skip: bool) -> None:
        """Continue a run that was killed, or repeat one. `skip`: after its complete shards."""
        where = self._url(self._names.index_name)
        earlier: dict[str, Any] = index.settings if isinstance(index.settings, dict) else {}
        for name, value in self._settings.items():
            if earlier.get(name) != value:
                raise FileExistsError(
                    f"{where} is of shards written with {name}={earlier.get(name)!r}, not {value!r}: repeat those "
                    "arguments, choose another name, or delete all by overwrite=True"
                )
        self._earlier = index.shards
        others = [name for name in stored if name != INDEX and self._names.number(name) not in index.shards]
        if index.complete and others:
            raise FileExistsError(
                f"{self._url(others[0])} exists, and is none of the {len(index.shards)} shards that write_shards has "
                "written: choose another name, or delete all by overwrite=True"
            )
        if not index.complete:
            # Complete shards without a record: the writer was killed in between. They are written again.
            for name in (*others, *({INDEX} & stored.keys())):
                await self._delete(name)
        if skip:
            await self._keep_intact()

    async def _stored(self) -> dict[str, None]:
        """Return the names of the objects that are shards of this data set, in order."""
        here = "" if self._stores.transport is not None else "./"
        transport, prefix = self._stores.find(self._names.folder or here)
        found: dict[str, None] = {}
        try:
            async with aclosing(transport.list(prefix + self._names.before)) as paths:
                async for path in paths:
                    name = path[len(prefix) :]
                    if self._names.number(name) is not None or (self._is_mds and name == INDEX):
                        found[name] = None
            if self._is_mds and await self._exists(INDEX):
                found[INDEX] = None
        except ObjectNotFound:  # the folder does not exist
            return {}
        return found

    async def _exists(self, name: str) -> bool:
        transport, path = self._find(name)
        try:
            await transport.info(path)
        except ObjectNotFound:
            return False
        return True

    async def _keep_intact(self) -> None:
        """Keep the shards of the earlier run up to the first that is not in the store as it is recorded."""
        intact: set[int] = set()

        async def look(number: int) -> None:
            if await self._is_stored(self._earlier[number]):
                intact.add(number)

        await for_each(self._earlier, look, CHECKS)
        self._done.update({number: self._earlier[number] for number in takewhile(intact.__contains__, count())})

    async def _is_stored(self, record: ShardRecord) -> bool:
        """Return whether the store has the recorded bytes: by their version, otherwise by their digest."""
        transport, path = self._find(record.name)
        try:
            info = await transport.info(path)
            if info.size != record.bytes or (info.etag is not None and info.etag == record.etag):
                return info.size == record.bytes
            digest = hashlib.sha256()
            async with aclosing(transport.stream(path, chunk_size=4 << 20)) as chunks:
                async for chunk in chunks:
                    await self._pool.run(partial(digest.update, chunk))
        except ObjectNotFound:
            return False
        return digest.hexdigest() == record.sha256

    # ------------------------------------------------------------------------------------------------- the store

    @property
    def _is_mds(self) -> bool:
        return self._names.format.name == "mds"

    def _url(self, name: str) -> str:
        return self._names.folder + name

    def _find(self, name: str) -> tuple[Transport, str]:
        return self._stores.find(self._url(name))

    async def _put(self, name: str, data: bytes) -> None:
        transport, path = self._find(name)
        await transport.write(path, [data])

    async def _delete(self, name: str) -> None:
        transport, path = self._find(name)
        await transport.delete(path)

    async def aclose(self) -> None:
        """Wait for the threads, and end them; `write` does so, too."""
        await self._pool.aclose()
