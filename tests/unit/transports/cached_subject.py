"""Helpers of the tests of `CachedTransport`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from asyncloader.transports import CachedTransport, MemoryTransport, ObjectInfo, Transport
from asyncloader.transports.cache_layout import ROOT_NAME
from asyncloader.transports.testing.subject import CONTENT

OTHER = CONTENT[::-1]
CHUNKS = [CONTENT[start : start + 1000] for start in range(0, len(CONTENT), 1000)]


class Asked(MemoryTransport):
    """A store that records its requests, and calls `during` before each response."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects)
        self.asked: list[str] = []
        self.during: dict[str, Any] = {}

    def _note(self, what: str, shown: str = "") -> None:
        self.asked.append(shown or what)
        if action := self.during.pop(what, None):
            action()

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        self._note("read")
        return await super().read(path, max_bytes=max_bytes)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        self._note("read_range")
        return await super().read_range(path, start, length)

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        self._note(f"stream {start}")
        async with aclosing(super().stream(path, start=start, chunk_size=chunk_size)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def size(self, path: str) -> int:
        self._note("size")
        return await super().size(path)

    async def info(self, path: str) -> ObjectInfo:
        self._note("info")
        return await super().info(path)

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


def around(inner: Transport, folder: Path, cache_bytes: int | None = None, **options: Any) -> CachedTransport:
    return CachedTransport(inner, "memory://", folder, cache_bytes, threads=4, **options)


def copied(store: MemoryTransport) -> MemoryTransport:
    """A store with the same objects, for a second transport: closing a transport closes its store."""
    return MemoryTransport(store._objects)


def files(folder: Path) -> list[Path]:
    """The files of all cached objects, and of all objects that are being written."""
    return [file for part in ["objects", "fills"] for file in (folder / ROOT_NAME / part).rglob("*") if file.is_file()]
