"""The conformance class finds the faults that a transport is likely to have, also in a project of a user's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Buffer

from asyncloader.transports import MemoryTransport, ObjectInfo, Transport
from asyncloader.transports.testing import TransportConformance, WritingConformance
from tests.conformance.test_written import texts_of_page
from tests.helpers.running import environment


class Conformance(TransportConformance, WritingConformance):
    """Tests a transport that keeps its objects in memory."""

    def __init__(self, kind: type[MemoryTransport]) -> None:
        self.kind = kind

    def make(self) -> Transport:
        return self.kind()

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, MemoryTransport)
        transport.put(path, data)


class ShortRanges(MemoryTransport):
    """Returns fewer bytes where the object ends before the range, as a slice does."""

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        return (await self.read(path))[start : start + length]


class LostByte(MemoryTransport):
    async def read_range(self, path: str, start: int, length: int) -> bytes:
        return (await super().read_range(path, start, length))[:-1]


class LongChunks(MemoryTransport):
    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        yield (await self.read(path))[start:]


class Unsorted(MemoryTransport):
    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        for path in reversed([path async for path in super().list(prefix)]):
            yield path


class SizeAsVersion(MemoryTransport):
    async def info(self, path: str) -> ObjectInfo:
        size = await self.size(path)
        return ObjectInfo(size, str(size))


class OpenForEver(MemoryTransport):
    async def aclose(self) -> None:
        """Do nothing."""


class HalfWrites(MemoryTransport):
    """Shows the beginning of an object while the rest is written."""

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        data, info = b"", ObjectInfo(0, None)
        for piece in pieces:
            data += piece
            info = await super().write(path, [data])
        return info


FAULTS: dict[str, tuple[type[MemoryTransport], Callable[[Any], Awaitable[None]]]] = {
    "short ranges": (ShortRanges, lambda tests: tests.test_range_past_the_end_is_an_error(16380, 5)),
    "a lost byte": (LostByte, lambda tests: tests.test_read_range_gives_the_slice(0, 16384)),
    "long chunks": (LongChunks, lambda tests: tests.test_stream_gives_all_chunks_in_order(1000)),
    "an unsorted list": (Unsorted, lambda tests: tests.test_list_is_sorted_and_filtered_by_string_prefix()),
    "a size as the version": (SizeAsVersion, lambda tests: tests.test_info_stands_for_the_bytes()),
    "half writes": (HalfWrites, lambda tests: tests.test_a_cancelled_write_is_whole_or_nothing()),
    "no close": (OpenForEver, lambda tests: tests.test_stream_in_progress_when_it_closes()),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_transport_fails(fault: str) -> None:
    """The test for this fault fails with it, and passes without it."""
    kind, test = FAULTS[fault]
    await test(Conformance(MemoryTransport))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await test(Conformance(kind))


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "failed"), [("", 0), ("- 1", 1)], ids=["sound", "short ranges"])
def test_it_runs_in_another_project(fault: str, failed: int, tmp_path: Path) -> None:
    """With pytest-asyncio's default mode a plain test module is enough; failed asserts show the values."""
    module = texts_of_page().replace("return file.read(length)", f"return file.read(length {fault})")
    (tmp_path / "test_zip_transport.py").write_text(module)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_zip_transport.py"],
        cwd=tmp_path,
        # pytest-asyncio warns where its options are unset. With CI set, pytest would write full diffs of unequal bytes.
        env={**environment(), "PYTHONWARNINGS": "default", "CI": "true"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == failed, ran.stdout + ran.stderr
    assert ("test_read_range_gives_the_slice" in ran.stdout) == bool(failed)
    assert ("At index" in ran.stdout) == bool(failed)
