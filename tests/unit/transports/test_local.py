from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from asyncloader.transports import (
    InvalidPath,
    LocalTransport,
    ObjectNotFound,
    ObjectTooLarge,
    RangeOutOfBounds,
    ReadFailed,
)
from asyncloader.transports.local import _read_block

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 40)
    return tmp_path


# --- the root


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/set", "/data/set"),
        ("/data/a%20b", "/data/a%20b"),
        ("file:///data/a%20b", "/data/a b"),
        ("FILE://localhost/data/", "/data"),
        ("file:///data/%3F%23", "/data/?#"),
        ("/data/../x", "/x"),
    ],
)
def test_url(url: str, expected: str) -> None:
    """A URL is unescaped, a plain path is not."""
    assert LocalTransport.from_url(url).root == expected


@pytest.mark.parametrize("url", ["file://host/data", "file://", "http:///data", "file:///a?b", "file:///a#b"])
def test_malformed_url(url: str) -> None:
    """Another machine's files, and a URL that was not escaped, are refused."""
    with pytest.raises(ValueError, match=r"file:///absolute/directory|escape it"):
        LocalTransport.from_url(url)


async def test_relative_root_is_fixed_when_it_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of the working directory has no effect."""
    monkeypatch.chdir(root.parent)
    transport = LocalTransport(root.name)
    monkeypatch.chdir("/")
    async with transport:
        assert await transport.size("a.bin") == 10240


async def test_missing_root(tmp_path: Path) -> None:
    """A missing root is no error until it is read from."""
    async with LocalTransport(tmp_path / "later") as transport:
        with pytest.raises(ObjectNotFound, match=r"the root '.*/later' is not a directory"):
            await transport.read("a")
        with pytest.raises(ObjectNotFound, match=r"the root '.*/later' is not a directory"):
            await anext(transport.list("x/"))
        (tmp_path / "later").mkdir()
        (tmp_path / "later/a").write_bytes(b"1")
        assert await transport.read("a") == b"1"


# --- reading


async def test_links_out_of_the_root_are_refused_everywhere(root: Path) -> None:
    """No method reads through a link that leads out."""
    (root / "evil").symlink_to("/etc/passwd")
    async with LocalTransport(root) as transport:
        for call in (
            transport.read("evil"),
            transport.read_range("evil", 0, 1),
            transport.size("evil"),
            anext(transport.stream("evil")),
            transport.open("evil").__aenter__(),
            _drain_list(transport),
        ):
            with pytest.raises(InvalidPath, match="'evil' leads out of the root"):
                await call


async def _drain_list(transport: LocalTransport) -> list[str]:
    return [path async for path in transport.list()]


async def test_ranges_far_into_a_sparse_file(root: Path) -> None:
    """Offsets above 4 GiB are right."""
    with (root / "sparse").open("wb") as file:
        file.seek(5 << 30)
        file.write(b"end")
    async with LocalTransport(root) as transport:
        assert await transport.size("sparse") == (5 << 30) + 3
        assert await transport.read_ranges("sparse", [(5 << 30, 3), (0, 2)]) == [b"end", b"\0\0"]
        with pytest.raises(ObjectTooLarge):
            await transport.read("sparse", max_bytes=1 << 20)


@linux
async def test_file_that_is_longer_than_its_size() -> None:
    """A file that states 0 bytes and gives more, like a growing file, is read whole, within `max_bytes`."""
    async with LocalTransport("/proc") as transport:
        assert await transport.size("version") == 0
        expected = Path("/proc/version").read_bytes()  # noqa: ASYNC240 - not a file on a disk
        assert await transport.read("version") == expected
        with pytest.raises(ObjectTooLarge, match=f"max_bytes={len(expected) - 1}"):
            await transport.read("version", max_bytes=len(expected) - 1)


@pytest.mark.skipif(not Path("/proc/kallsyms").exists(), reason="needs a file that is given page by page")
def test_ranges_come_whole_from_a_file_that_gives_less_than_asked() -> None:
    """A system call may return fewer bytes than requested: always above 2 GiB, here after a page."""
    with Path("/proc/kallsyms").open("rb") as file:
        expected = file.read(30_000)
        assert len(os.pread(file.fileno(), 20_000, 10_000)) < 20_000
        assert _read_block(file.fileno(), "kallsyms", 10_000, 20_000) == expected[10_000:]


def test_file_cut_short_after_its_size_was_taken(root: Path) -> None:
    """A range that is truncated after the file was opened is an error, not a short result."""
    with (root / "a.bin").open("rb") as file, pytest.raises(RangeOutOfBounds, match="cut to 10,240 bytes") as caught:
        _read_block(file.fileno(), "a.bin", 10_000, 1_000)
    assert (caught.value.path, caught.value.size) == ("a.bin", 10_240)


async def test_a_chunk_of_any_size(root: Path) -> None:
    """Only the memory that the file needs is allocated for a chunk, however large it may be."""
    async with LocalTransport(root) as transport:
        whole = await transport.read("a.bin")
        assert [chunk async for chunk in transport.stream("a.bin", chunk_size=sys.maxsize)] == [whole]


@linux
async def test_broken_read() -> None:
    """An error of the disk is ReadFailed with the system's message. (Page 0 of a process is never mapped.)"""
    async with LocalTransport(f"/proc/{os.getpid()}") as transport:
        with pytest.raises(ReadFailed, match=r"reading '/proc/.*/mem' failed: Input/output error") as caught:
            await transport.read("mem")
        assert isinstance(caught.value, OSError)
        with pytest.raises(ReadFailed, match="Input/output error"):
            await anext(transport.stream("mem"))


async def test_a_prefix_lists_what_the_whole_listing_has(root: Path) -> None:
    """A link that leads above the prefix's directory is skipped there, too."""
    (root / "b/c").mkdir(parents=True)
    (root / "b/c/1").write_bytes(b"")
    (root / "b/c/up").symlink_to("../..")
    (root / "b/c/near").symlink_to("..")
    async with LocalTransport(root) as transport:
        everything = [path async for path in transport.list()]
        for prefix in ["b/", "b/c/", "b/c/u", "b/c/up/", "b/c/near/c/"]:
            expected = [path for path in everything if path.startswith(prefix)]
            assert [path async for path in transport.list(prefix)] == expected, prefix
