"""Shards compressed with gzip and zstd, decompression bombs, and the choice of a reader by extension."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
import tracemalloc
import zlib
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import (
    CompressedReader,
    JsonlReader,
    ShardError,
    ShardRange,
    cut_shard,
    open_reader,
    shard_format,
)
from asyncloader.formats.compressed import STEP, ZSTD_MODULES, MemberDecoder
from tests.drawn import scaled
from tests.unit.formats.shard_readers import (
    URL,
    check_any_split,
    check_resume,
    corrupted,
    cut_points,
    drive,
    error_of,
    read,
)

LINES = b"".join(json.dumps({"n": n, "text": "word " * (n % 7)}).encode() + b"\n" for n in range(300))

WHOLE = LINES[: LINES.index(b"\n", 3000)]


def make(start: int = 0) -> CompressedReader:
    return CompressedReader(URL, JsonlReader(URL, start=start), MemberDecoder("gzip"))


@given(members=st.lists(st.integers(0, len(LINES)), max_size=4), pad=st.integers(0, 600), cuts=cut_points)
@settings(deadline=None, max_examples=scaled(30))
def test_gzip_members_in_any_chunks(members: list[int], pad: int, cuts: list[float]) -> None:
    """Members may end inside a line, be empty, or be padded: the samples are those of the plain shard."""
    edges = [0, *sorted(members), len(LINES)]
    data = b"".join(gzip.compress(LINES[a:b]) for a, b in pairwise(edges)) + bytes(pad)
    assert gzip.decompress(data) == LINES
    assert check_any_split(make, data, cuts) == read(lambda start: JsonlReader(URL, start=start), LINES)


def test_resume_reads_from_the_beginning() -> None:
    """Offsets count decompressed bytes: a reader from any offset is fed the whole object, and gives the rest."""
    assert make(start=500).feed_from == 0
    check_resume(make, gzip.compress(LINES[: LINES.index(b"\n", 2000)]))


def test_a_shard_that_ends_before_the_position_to_resume_at() -> None:
    """The shard was replaced by a shorter one: an error, as without compression. Its very end is a position."""
    data = gzip.compress(LINES)
    assert read(make, data, start=len(LINES)) == ([], None)
    samples, error = read(make, data, start=len(LINES) + 7)
    assert samples == []
    assert error is not None
    assert "it ends 7 decompressed bytes before" in error[0]


def test_gzip_truncated_or_damaged() -> None:
    """An end inside a member, a wrong CRC, an empty object and foreign bytes are errors with the URL."""
    data = gzip.compress(LINES)
    for broken in (data[:-1], data[:-9], data[:5], b""):
        assert "truncated" in error_of(make, broken)[0]
    for broken in (data[:-8] + bytes(4) + data[-4:], b"{}\n" + data, data + b"\0\0xx", data + b"rubbish"):
        _, error = read(make, broken)
        assert error is not None
        assert "damaged" in error[0]
    reader = make()
    for chunk in (data[:-8] + bytes(8), b"", data):
        with pytest.raises(ShardError, match="damaged"):
            reader.feed(chunk)
    assert not reader.done
    assert not reader.pending


@pytest.mark.thorough
def test_a_bomb_is_read_in_steps() -> None:
    """200 MB in little gzip: `feed` gives the samples of a few steps, and holds the size of a few steps."""
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b"{}\n" + b" " * 99_996 + b"\n") for _ in range(2000)) + packer.flush()
    reader = make()
    tracemalloc.start()
    count = len(reader.feed(bomb))
    assert 0 < count <= 6 * STEP // 100_000
    while reader.pending:
        count += len(reader.feed(b""))
    count += len(reader.end())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000
    assert peak < 16 * STEP


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_bomb_of_one_line(ending: str) -> None:
    """A line of 64 MB in some KB is refused at the limit, without the memory for the line."""
    packed = (gzip.compress if ending == "gz" else compress)(b"{}\n" + bytes(64 << 20))
    reader = open_reader(URL, shard_format(f"a.jsonl.{ending}"), max_sample_bytes=3 * STEP)
    tracemalloc.start()
    samples, error = drive(reader, [packed])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 1
    assert error is not None
    assert "max_sample_bytes=3,145,728" in error[0]
    assert error[1] == 3
    assert peak < 32 * STEP


def test_a_bomb_of_empty_members() -> None:
    """Many empty members are decoded a thousand at a time, and do not end the shard."""
    reader = make()
    data = gzip.compress(b"") * 3000 + gzip.compress(b'{"a": 1}')
    assert reader.feed(data) == []
    calls = 1
    while reader.pending:
        assert reader.feed(b"") == []
        calls += 1
    assert 3 <= calls <= 5
    assert reader.end()[0].sample["a"] == 1


@pytest.mark.thorough
def test_end_while_pending_is_a_mistake_of_the_caller() -> None:
    """`end` would silently lose samples, so it raises a RuntimeError."""
    reader = make()
    reader.feed(gzip.compress(b"{}\n" * (9 * STEP)))
    with pytest.raises(RuntimeError, match="pending"):
        reader.end()


@given(data=corrupted(gzip.compress(WHOLE)))
@settings(deadline=None, max_examples=scaled(100))
def test_random_damage(data: bytes) -> None:
    """Damaged gzip gives a `ShardError` or the packed samples: its checksum excludes anything else."""
    right = read(lambda start: JsonlReader(URL, start=start), WHOLE)[0]
    for cuts in ((), [at / 40 for at in range(40)]):
        samples, error = read(make, data, cuts)
        assert error is not None or samples == right


# ------------------------------------------------------------------------------------------------------------ zstd


class Own:
    """A frame of the extra's package, made like one of Python 3.14's."""

    def __init__(self, package: Any, _: None, options: dict[str, int]) -> None:
        assert options == {"window": 27}
        self._frame = package.ZstdDecompressor().decompressobj()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)


def compress(*parts: bytes) -> bytes:
    """A frame of each, written as a stream: it has a window instead of a length."""
    package: Any = importlib.import_module("zstandard" if sys.version_info < (3, 14) else "compression.zstd")
    written = b""
    for part in parts:
        stream = package.ZstdCompressor()
        stream = stream.compressobj() if hasattr(stream, "compressobj") else stream
        written += stream.compress(part) + stream.flush()
    return written


def of_zstd(start: int = 0) -> CompressedReader:
    return CompressedReader(URL, JsonlReader(URL, start=start), MemberDecoder("zstd"))


@pytest.mark.parametrize("own", [False, True])
def test_zstd_frames(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by the package that is installed and by Python's own, in any chunks and bounded steps."""
    if own and sys.version_info < (3, 14):
        package = importlib.import_module("zstandard")
        module: Any = ModuleType("compression.zstd")
        module.ZstdDecompressor = partial(Own, package)
        module.DecompressionParameter = SimpleNamespace(window_log_max="window")
        monkeypatch.setitem(sys.modules, "compression.zstd", module)
    plain = read(lambda start: JsonlReader(URL, start=start), LINES)
    data = compress(LINES[:5000], b"", LINES[5000:])
    assert check_any_split(of_zstd, data, [0.1, 0.11, 0.7]) == plain
    assert "truncated" in error_of(of_zstd, data[:-1])[0]
    _, error = read(of_zstd, b"rubbish" * 5)
    assert error is not None
    assert "damaged" in error[0]
    bomb = of_zstd()
    got = len(bomb.feed(compress((b"{}" + b" " * 99_997 + b"\n") * 500)))
    assert got <= 100  # of 500: at most 8 MiB and a step
    while bomb.pending:
        got += len(bomb.feed(b""))
    assert got + len(bomb.end()) == 500


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_zstd_windows(window_log: int) -> None:
    """Windows of up to 128 MiB are read; for a larger window the error says so, and not that the data is damaged."""
    data = bytearray(compress(LINES))
    data[5] = window_log - 10 << 3  # RFC 8878, 3.1.1.1.2: declares this window
    samples, error = read(of_zstd, bytes(data))
    if window_log <= 27:
        assert (len(samples), error) == (300, None)
    else:
        assert error is not None
        assert "window is larger than 128 MiB" in error[0]
        assert "--long=27" in error[0]
        assert "damaged" not in error[0]


def test_zstd_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    for name in ZSTD_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"asyncloader\[shards\]"):
        open_reader("a.jsonl.zst")


# -------------------------------------------------------------------------------------------------------- registry


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("a.tar", ("tar", None)),
        ("s3://b/a-000.TAR", ("tar", None)),
        ("a.tgz", ("tar", "gzip")),
        ("a.tar.gz", ("tar", "gzip")),
        ("a.ndjson.zst", ("jsonl", "zstd")),
        ("a.tfrecord.gz", ("tfrecord", "gzip")),
        ("shard.00000.mds", ("mds", None)),
        ("a.tar/", ("tar", None)),
    ],
)
def test_format_by_extension(url: str, form: tuple[str, str | None]) -> None:
    """The extension counts in upper and lower case, also before a slash; a URL's query does not count."""
    assert shard_format(url) == form


@pytest.mark.parametrize("url", ["a.txt", "http://h/tar", "a.gz"])
def test_unknown_extensions(url: str) -> None:
    """The error names the URL and advises `format=`."""
    with pytest.raises(ValueError, match="give format=") as caught:
        shard_format(url)
    assert url in str(caught.value)


def test_open_reader_refuses() -> None:
    """Refused: an unknown format, MDS without its index, and a tar part that begins inside a sample."""
    with pytest.raises(ValueError, match="unknown"):
        open_reader("a.tar", shard_format("a.tar")._replace(name="zip"))
    with pytest.raises(ValueError, match="parse_mds_index"):
        open_reader("a.mds")
    with pytest.raises(ValueError, match="begins"):
        open_reader("a.tar", part=ShardRange(512, None, sync=True))


def test_what_cannot_be_cut_is_one_part() -> None:
    """Only plain JSON lines can be cut by size; other shards are one part."""
    assert len(cut_shard(shard_format("a.jsonl"), 100, 4)) == 4
    for url in ("a.jsonl.gz", "a.tar", "a.tfrecord", "a.mds"):
        assert cut_shard(shard_format(url), 100, 4) == [ShardRange(0, None, sync=False)]
