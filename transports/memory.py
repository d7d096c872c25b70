"""`MemoryTransport`: keeps objects in a dictionary of this process, ``memory://``.

Data path: dataset -> [memory] -> sample.

For tests and small datasets. It satisfies the whole contract of `base.py` and passes the same conformance tests as the
other transports. Like real reads, each call lets the event loop run once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self

from typing_extensions import Buffer

from asyncloader.transports.base import ObjectInfo, Transport
from asyncloader.transports.checks import (
    check_chunk_size,
    check_path,
    check_prefix,
    check_range,
    check_size,
    check_start,
)
from asyncloader.transports.errors import ObjectNotFound, TransportClosed


class MemoryTransport(Transport):
    """Serves the objects given to it. A pickled copy has copies of them, so each worker's copy takes the same memory
    again.

    Args:
        objects: path -> bytes; copied, not shared with the caller's mapping. Default: none.

    Raises:
        InvalidPath: one of the paths is not canonical.
        TypeError: one of the values is not bytes.
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self._objects: dict[str, bytes] = {}
        self._tags: dict[str, tuple[bytes, str]] = {}  # the bytes that were hashed last, and their hash
        self._closed = False
        for path, data in (objects or {}).items():
            self.put(path, data)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make a separate transport for ``memory://``; two URLs never share objects."""
        if url.lower() != "memory://":
            raise ValueError(f"the URL of a memory transport is just memory://, got {url!r}")
        return cls(**options)

    def __repr__(self) -> str:
        return f"<MemoryTransport objects={len(self._objects)} {'closed' if self._closed else 'open'}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[dict[str, bytes]]]:
        return type(self), (self._objects,)

    def put(self, path: str, data: bytes) -> None:
        """Store an object, replacing one with the same path. Errors as in the constructor."""
        check_path(path)
        if not isinstance(data, bytes):
            raise TypeError(f"the object {path!r} must be bytes, got {type(data).__name__}; bytes(data) makes a copy")
        self._objects[path] = data

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return an object, without a copy, like `Transport.read`."""
        data = await self._find(path)
        check_size(path, len(data), max_bytes)
        return data

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Return a part of an object, like `Transport.read_range`."""
        data = await self._find(path)
        check_range(path, len(data), start, length)
        return data[start : start + length]

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Return in chunks the object that exists at the first chunk, like `Transport.stream`."""
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        data = await self._find(path)
        check_start(path, len(data), start)
        for position in range(start, len(data), chunk_size):
            yield data[position : position + chunk_size]
            await self._checkpoint()

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the paths that exist when the first path is returned, like `Transport.list`."""
        check_prefix(prefix)
        await self._checkpoint()
        for path in sorted(self._objects):
            if path.startswith(prefix):
                yield path
                await self._checkpoint()

    async def size(self, path: str) -> int:
        """Return an object's size in bytes, like `Transport.size`."""
        return len(await self._find(path))

    async def info(self, path: str) -> ObjectInfo:
        """Return an object's size and the hash of its bytes, like `Transport.info`."""
        return self._describe(path, await self._find(path))

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Return an object with the hash of its bytes, like `Transport.read_with_info`."""
        data = await self.read(path, max_bytes=max_bytes)
        return data, self._describe(path, data)

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        """Store an object, like `Transport.write`."""
        check_path(path)
        await self._checkpoint()
        self.put(path, b"".join(pieces))
        return self._describe(path, self._objects[path])

    async def delete(self, path: str) -> None:
        """Delete an object, like `Transport.delete`."""
        check_path(path)
        await self._checkpoint()
        self._objects.pop(path, None)

    async def aclose(self) -> None:
        """Refuse further calls, like `Transport.aclose`. The objects live as long as the transport."""
        self._closed = True

    async def _find(self, path: str) -> bytes:
        check_path(path)
        await self._checkpoint()
        try:
            return self._objects[path]
        except KeyError:
            raise ObjectNotFound(
                f"{path!r} does not exist among the {len(self._objects)} objects in memory", path=path
            ) from None

    def _describe(self, path: str, data: bytes) -> ObjectInfo:
        # A hash, not a counter: it is the same in copies of other processes.
        hashed, tag = self._tags.get(path, (None, ""))
        if hashed is not data:
            tag = hashlib.blake2b(data, digest_size=16).hexdigest()
            self._tags[path] = data, tag
        return ObjectInfo(len(data), tag)

    async def _checkpoint(self) -> None:
        """Let the loop run, so that callers can interleave and be cancelled as with real reads."""
        if not self._closed:
            await asyncio.sleep(0)
        # Again: it may have been closed while the loop ran.
        if self._closed:
            raise TransportClosed("the memory transport is closed; open another one")
