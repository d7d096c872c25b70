"""Helpers of the tests of the cache directory."""

from __future__ import annotations

from pathlib import Path

from asyncloader.transports.cache_layout import ROOT_NAME, entry_name, hash_key
from asyncloader.transports.cache_store import CacheEntry, CacheFill, CacheStore
from asyncloader.transports.cache_usage import CacheCounts

DATA = bytes(range(256)) * 8


def opened(folder: Path, limit: int | None = None) -> CacheStore:
    return CacheStore(str(folder), limit, CacheCounts())


def put(store: CacheStore, url: str, etag: str = "1", data: bytes = DATA) -> None:
    store.put(hash_key(url), etag, data)


def held(store: CacheStore, url: str, etag: str = "1") -> bytes | None:
    """The cached bytes of an object, or None if it is not cached."""
    return content(store.open(hash_key(url), etag))


def content(entry: CacheEntry | None) -> bytes | None:
    if entry is None:
        return None
    try:
        return entry.read(0, entry.size)
    finally:
        entry.close()


def file_of(folder: Path, url: str, etag: str = "1") -> Path:
    key = hash_key(url)
    return folder / ROOT_NAME / "objects" / key[:3] / entry_name(key, etag)


def everything(folder: Path) -> set[Path]:
    """The files of all objects, and of all objects that are being written."""
    root = folder / ROOT_NAME
    return {file for part in ["objects", "fills"] for file in (root / part).rglob("*") if file.is_file()}


def disk_use(folder: Path) -> int:
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in everything(folder))


def begun(store: CacheStore, url: str, etag: str = "1", size: int = len(DATA)) -> CacheFill:
    fill = store.claim(hash_key(url), etag, size)
    assert fill is not None
    return fill
