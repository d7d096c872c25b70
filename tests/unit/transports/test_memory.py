from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from asyncloader.transports import MemoryTransport


async def test_objects_are_copied_from_the_mapping() -> None:
    """Later changes of the caller's mapping have no effect."""
    objects = {"a": b"1"}
    async with MemoryTransport(objects) as transport:
        objects["b"] = b"2"
        assert [path async for path in transport.list()] == ["a"]


async def test_stream_gives_the_object_as_it_was() -> None:
    """A stream in progress does not mix old and new bytes."""
    async with MemoryTransport({"a": b"old"}) as transport:
        chunks = []
        async for chunk in transport.stream("a", chunk_size=1):
            transport.put("a", b"new")
            chunks.append(chunk)
        assert b"".join(chunks) == b"old"


@pytest.mark.parametrize("data", [bytearray(b"1"), "1", memoryview(b"1")])
def test_put_refuses_what_is_not_bytes(data: Any) -> None:
    """A read returns immutable bytes, so only bytes can be stored."""
    with pytest.raises(TypeError, match=f"the object 'a' must be bytes, got {type(data).__name__}"):
        MemoryTransport().put("a", data)


async def test_pickled_copy_has_objects_of_its_own() -> None:
    """A worker's copy is complete and independent."""
    transport = MemoryTransport({"a": b"1"})
    copy = pickle.loads(pickle.dumps(transport))
    transport.put("b", b"2")
    assert [path async for path in copy.list()] == ["a"]
    await transport.aclose()
    await copy.aclose()


def test_url() -> None:
    """Two URLs give two stores; a name in the URL, which would suggest a shared store, is refused."""
    assert "objects=0" in repr(MemoryTransport.from_url("Memory://"))
    with pytest.raises(ValueError, match="just memory://, got 'memory://shared'"):
        MemoryTransport.from_url("memory://shared")


async def test_each_call_lets_the_loop_run() -> None:
    """Code that overlooks that reads can be interleaved fails with this transport too."""
    async with MemoryTransport({"a": b"1"}) as transport:
        order: list[str] = []

        async def other() -> None:
            order.append("other")

        task = asyncio.create_task(other())
        await transport.read("a")
        order.append("read")
        await task
        assert order == ["other", "read"]
