"""Versions of objects in transports other than HTTP, and streams from any byte."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from asyncloader.transports import LocalTransport, MemoryTransport, ObjectInfo, RangeOutOfBounds, Transport
from asyncloader.transports.checks import check_start


def test_check_start() -> None:
    """Any byte of the object, and its end, may be a start; other starts are an error that has the size."""
    for start in [0, 3, 5]:
        check_start("a", 5, start)
    check_start("a", None, 1 << 60)
    with pytest.raises(RangeOutOfBounds, match="from byte 1,000 of 'a' was asked for, but it has 5 bytes") as caught:
        check_start("a", 5, 1000)
    assert (caught.value.path, caught.value.size) == ("a", 5)
    with pytest.raises(ValueError, match="start must be 0 or more bytes, got -1"):
        check_start("a", None, -1)


# ------------------------------------------------------------------------------------------------ inherited methods


class Plain(MemoryTransport):
    """Has the inherited `info` and `read_with_info`."""

    info = Transport.info
    read_with_info = Transport.read_with_info


class Told(Plain):
    """Returns the given versions, one per request."""

    def __init__(self, *versions: str | None, data: bytes) -> None:
        super().__init__({"a": data})
        self.versions = list(versions)

    async def info(self, path: str) -> ObjectInfo:
        return ObjectInfo(4, self.versions.pop(0)) if self.versions else await super().info(path)


@pytest.mark.parametrize(
    ("versions", "data", "known"),
    [
        (("1", "1"), b"data", "1"),
        (("1", "2"), b"data", None),
        (("1", None), b"data", None),
        ((None, "1"), b"data", None),
        (("1", "1"), b"other", None),
        ((), b"data", None),
    ],
)
async def test_a_version_that_is_asked_for_twice(
    versions: tuple[str | None, ...], data: bytes, known: str | None
) -> None:
    """Without a method of its own a transport names a read's version only if it was the same before and after."""
    assert await Told(*versions, data=data).read_with_info("a") == (data, (len(data), known))


# ------------------------------------------------------------------------------------------------------- memory


async def test_memory_versions_are_of_the_bytes() -> None:
    """Equal bytes have one version in all stores and copies, other bytes another; `put` changes the version."""
    one, two = MemoryTransport({"a": b"1", "b": b"2"}), MemoryTransport({"a": b"1"})
    assert await one.info("a") == await two.info("a") == await pickle.loads(pickle.dumps(one)).info("a")
    assert (await one.info("a")).etag != (await one.info("b")).etag
    one.put("a", b"2")
    assert await one.info("a") == await one.info("b")


# -------------------------------------------------------------------------------------------------------- files


async def test_a_files_version(tmp_path: Path) -> None:
    """A file has a version once it has rested; another file, size or time has another; reading does not change it."""
    file = tmp_path / "a"
    file.write_bytes(b"data")
    async with LocalTransport(tmp_path, threads=1) as transport:
        assert await transport.info("a") == (4, None)
        assert await transport.read_with_info("a") == (b"data", (4, None))
        os.utime(file, (1000, 1000))
        rested = await transport.info("a")
        assert rested.etag
        assert await transport.info("a") == rested
        assert await transport.read_with_info("a") == (b"data", rested)
        seen: set[str | None] = {rested.etag}
        for data, seconds in [(b"data", 1001), (b"longer", 1000)]:
            file.write_bytes(data)
            os.utime(file, (seconds, seconds))
            seen.add((await transport.info("a")).etag)
        other = tmp_path / "b"
        other.write_bytes(b"data")
        os.utime(other, (1000, 1000))
        other.rename(file)
        seen.add((await transport.info("a")).etag)
        assert len(seen) == 4
        assert None not in seen
        future = file.stat().st_mtime + 1e9
        os.utime(file, (future * 2, future * 2))
        assert (await transport.info("a")).etag is None


async def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    """Bytes whose version differs before and after the read have no version."""
    file = tmp_path / "a"
    file.write_bytes(b"data")
    os.utime(file, (1000, 1000))

    class Growing(LocalTransport):
        def _read(self, path: str, max_bytes: int | None, descriptor: int, size: int) -> bytes:
            data = super()._read(path, max_bytes, descriptor, size)
            with file.open("ab") as end:
                end.write(b"more")
            os.utime(file, (1000, 1000))
            return data

    async with Growing(tmp_path, threads=1) as transport:
        assert await transport.read_with_info("a") == (b"data", (4, None))
