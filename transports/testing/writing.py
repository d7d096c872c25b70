"""Conformance tests of writing: objects appear whole or not at all, and replace others.

Data path: none; see `asyncloader.transports.testing`.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from asyncloader.transports.errors import InvalidPath, ObjectNotFound, TransportClosed
from asyncloader.transports.testing.reading import ILLEGAL_PATHS
from asyncloader.transports.testing.subject import CONTENT, TransportSubject, check_bytes, drain


class WritingConformance(TransportSubject):
    """Tests the methods of a transport that write. Only for transports that can."""

    @pytest.mark.parametrize("size", [0, 1, 4096, 17 << 20])
    @pytest.mark.parametrize("pieces", [1, 3])
    async def test_read_gives_what_was_written(self, size: int, pieces: int) -> None:
        """Any number of bytes, in one piece or several, some of them empty and of other types than bytes."""
        data = (CONTENT * (size // len(CONTENT) + 1))[:size]
        edges = [size * piece // pieces for piece in range(pieces + 1)]
        parts = [memoryview(data)[edges[at] : edges[at + 1]] for at in range(pieces)]
        async with self.make() as transport:
            info = await transport.write("some/where/object.bin", [b"", *parts, bytearray()])
            check_bytes(await transport.read("some/where/object.bin"), data)
            assert info.size == size
            assert info.etag is None or info == await transport.info("some/where/object.bin")

    async def test_write_replaces(self) -> None:
        """The last writer's bytes stay, whether they are more or fewer."""
        async with self.make() as transport:
            for data in (b"12345", b"1", b"", CONTENT):
                await transport.write("a", [data])
                check_bytes(await transport.read("a"), data)
            assert await drain(transport.list()) == ["a"]

    async def test_deleted_objects_do_not_exist(self) -> None:
        """An object can be deleted again, and written again."""
        async with self.make() as transport:
            await transport.write("a/b", [b"1"])
            await transport.delete("a/b")
            await transport.delete("a/b")
            with pytest.raises(ObjectNotFound):
                await transport.read("a/b")
            assert await drain(transport.list()) == []
            await transport.write("a/b", [b"2"])
            check_bytes(await transport.read("a/b"), b"2")

    @pytest.mark.parametrize("path", ILLEGAL_PATHS)
    async def test_illegal_paths_are_not_written(self, path: str) -> None:
        """Nothing leaves the root."""
        async with self.make() as transport:
            with pytest.raises(InvalidPath):
                await transport.write(path, [b"1"])
            with pytest.raises(InvalidPath):
                await transport.delete(path)

    async def test_concurrent_writes_do_not_mix(self) -> None:
        """Many objects at a time, each with its own bytes."""
        async with self.make() as transport:
            numbers = range(30)
            await asyncio.gather(*(transport.write(str(each), [b"%d" % each] * 1000) for each in numbers))
            for each in numbers:
                check_bytes(await transport.read(str(each)), b"%d" % each * 1000)

    async def test_a_cancelled_write_is_whole_or_nothing(self) -> None:
        """Wherever it is cancelled: the object before it, or its own; and the transport can be used."""
        old, new = b"old" * 10, CONTENT * 128
        async with self.make() as transport:
            for turns in count():
                await transport.write("a", [old])
                task = asyncio.create_task(transport.write("a", [new, new]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                done = not task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert await transport.read("a") in (old, new + new)
                assert await drain(transport.list("a")) == ["a"]
                if done or turns > 30:
                    break

    async def test_a_closed_transport_does_not_write(self) -> None:
        """As with reads."""
        transport = self.make()
        await transport.aclose()
        with pytest.raises(TransportClosed):
            await transport.write("a", [b"1"])
        with pytest.raises(TransportClosed):
            await transport.delete("a")
