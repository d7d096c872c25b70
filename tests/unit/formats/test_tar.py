"""Tar shards: names become keys and fields as in webdataset, and hostile archives are refused."""

from __future__ import annotations

import importlib
import io
import os
import tarfile
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import TarReader
from asyncloader.formats.tar import split_name
from tests.drawn import scaled
from tests.unit.formats.shard_readers import (
    URL,
    check_any_split,
    check_resume,
    cut_points,
    error_of,
    read,
    samples_of,
)

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def make(start: int = 0) -> TarReader:
    return TarReader(URL, start=start)


def pack(members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, **info: Any) -> bytes:
    """An archive written by Python's tarfile; `info` are attributes of each member."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in info.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def with_header(archive: bytes, **fields: bytes) -> bytes:
    """The archive with fields of its first header overwritten, and the checksum adapted."""
    places = {"size": 124, "type": 156, "magic": 257, "name": 0}
    block = bytearray(archive[:512])
    for name, value in fields.items():
        block[places[name] : places[name] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + archive[512:]


SMALL = pack([("a.jpg", b"J" * 700), ("a.cls", b"3"), ("b.jpg", b""), ("d/c.left.PNG", b"P" * 512)])
WANTED = [
    {"__key__": "a", "__url__": URL, "jpg": b"J" * 700, "cls": b"3"},
    {"__key__": "b", "__url__": URL, "jpg": b""},
    {"__key__": "d/c", "__url__": URL, "left.png": b"P" * 512},
]


def test_members_with_one_key_are_one_sample() -> None:
    """The key extends to the first dot of the base name; the field's name is in lower case."""
    assert samples_of(make(), SMALL) == WANTED


names = st.lists(
    st.sampled_from(
        [
            *("a.jpg", "a.JPG", "a.txt", "b.c.d", "x/a.jpg", "x/y.z/b.txt", "x/noext", "ü/é.json", "__m__/a.b"),
            *("long/" * 40 + "name.txt", "n" * 120 + ".bin", "./q.txt", "../up.txt", "/abs.txt", "__m__.x"),
        ]
    ),
    max_size=8,
    unique=True,
)


@given(
    names=names,
    sizes=st.lists(st.integers(0, 1500), min_size=8, max_size=8),
    cuts=cut_points,
    kind=st.sampled_from([*FORMATS]),
)
@settings(deadline=None, max_examples=scaled(60))
def test_any_archive_of_tarfile_in_any_chunks(names: list[str], sizes: list[int], cuts: list[float], kind: str) -> None:
    """Archives of Python's tarfile in each of its formats are read; chunks make no difference; resume offsets work."""
    members = [(name, os.urandom(size)) for name, size in zip(names, sizes, strict=False)]
    if kind == "ustar":
        members = [(name, data) for name, data in members if len(name.encode()) < 100]
    archive = pack(members, FORMATS[kind])
    samples, error = check_any_split(make, archive, cuts)
    if error is None:
        found = {(s["__key__"], field): s[field] for s, _ in samples for field in s if field[0] != "_"}
        assert found == {split: data for name, data in members if (split := split_name(name))}
        check_resume(make, archive)
    else:
        assert "twice" in error[0]


def test_a_size_in_a_pax_header_is_that_of_one_member() -> None:
    """Writers use it for members of more than 8 GB; the next member has the size in its own header."""
    first = pack([("a.txt", b"x" * 700)], tarfile.PAX_FORMAT, pax_headers={"size": "700"}).rstrip(b"\0")
    archive = first + bytes(-len(first) % 512) + pack([("b.txt", b"y" * 3), ("c.txt", b"z")])
    assert [sample["txt"] for sample in samples_of(make(), archive)] == [b"x" * 700, b"y" * 3, b"z"]


class TestWebdataset:
    """The same files written by webdataset's writer, or read by its reader."""

    def read(self, archive: bytes) -> list[dict[str, Any]]:
        iterators: Any = importlib.import_module("webdataset.tariterators")
        files = iterators.tar_file_expander([{"url": URL, "stream": io.BytesIO(archive)}])
        return list(iterators.group_by_keys(files))

    @given(names=names)
    @settings(deadline=None, max_examples=scaled(40))
    def test_what_it_reads(self, names: list[str]) -> None:
        """webdataset's reader and ours agree on keys, fields, order, and on archives with a field twice."""
        archive = pack([(name, name.encode()) for name in names], tarfile.GNU_FORMAT)
        samples, error = read(make, archive)
        if error is None:
            assert [sample for sample, _ in samples] == self.read(archive)
        else:
            with pytest.raises(ValueError, match="duplicate"):
                self.read(archive)


def test_links_devices_and_directories_are_skipped() -> None:
    """These members have no data in a stream; no link is followed and no file is made."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, kind in enumerate(
            [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
        ):
            member = tarfile.TarInfo(f"m{number}.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        member = tarfile.TarInfo("real.txt")
        member.size = 2
        archive.addfile(member, io.BytesIO(b"ok"))
    assert samples_of(make(), file.getvalue()) == [{"__key__": "real", "__url__": URL, "txt": b"ok"}]


def test_an_old_tar_without_magic_and_a_signed_checksum() -> None:
    """v7 headers have no prefix field; some old writers summed signed bytes."""
    archive = with_header(pack([("a.txt", b"x")]), magic=bytes(8), name="é.txt".encode())
    block = bytearray(archive[:512])
    total = int(block[148:154], 8)
    block[148:156] = b"%06o\0 " % (total - 2 * 256)
    assert samples_of(make(), bytes(block) + archive[512:]) == [{"__key__": "é", "__url__": URL, "txt": b"x"}]


def test_a_size_in_base_256() -> None:
    """GNU's way to write large sizes is read; an impossible size is an error and allocates nothing."""
    archive = pack([("a.txt", b"hello")])
    size = b"\x80" + (5).to_bytes(11, "big")
    assert samples_of(make(), with_header(archive, size=size))[0]["txt"] == b"hello"
    huge = with_header(archive, size=b"\x80" + (1 << 80).to_bytes(11, "big"))
    assert error_of(make, huge) == (
        f"a sample takes more than max_sample_bytes=1,073,741,824 bytes ({URL} at byte 0)",
        0,
    )
    assert "truncated" in error_of(make, with_header(huge, name=b"noext\0"))[0]  # skipped, so nothing is held


class TestRefused:
    """Each of these is a `ShardError` with the URL and the offset of the header."""

    CASES: ClassVar[dict[str, tuple[bytes, str]]] = {
        "checksum": (SMALL[:100] + b"!" + SMALL[101:], "checksum is wrong"),
        "no tar": (b"<html>404</html>" * 64, "checksum is wrong"),
        "no octal": (with_header(SMALL, size=b"0000009"), "impossible size"),
        "negative": (with_header(SMALL, size=b"\xff" * 12), "impossible size"),
        "sparse": (with_header(SMALL, type=b"S"), "sparse"),
        "multi-volume": (with_header(SMALL, type=b"M"), "another volume"),
        "pax sparse": (pack([("a.txt", b"")], tarfile.PAX_FORMAT, pax_headers={"GNU.sparse.major": "1"}), "sparse"),
        "pax size": (pack([("a.txt", b"")], tarfile.PAX_FORMAT, pax_headers={"size": "9" * 30}), "impossible size"),
        "pax record": (with_header(pack([("a.txt", b"99 path=b\n")]), type=b"x"), "broken record"),
        "pax zero": (with_header(pack([("a.txt", b"0 =\n")]), type=b"x"), "broken record"),
        "pax global": (with_header(pack([("a.txt", b"14 path=b.txt\n")]), type=b"g"), "for all members"),
        "long header": (with_header(SMALL, type=b"L", size=b"77777777777"), "extension header"),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_at_the_first_header(self, case: str) -> None:
        """No sample is delivered."""
        archive, message = self.CASES[case]
        text, offset = error_of(make, archive)
        assert message in text
        assert URL in text
        assert offset is not None

    def test_a_field_twice(self) -> None:
        """The second field would overwrite the first; so would a field called __key__."""
        for names in (["a.txt", "a.TXT"], ["a.__key__"]):
            assert "twice" in error_of(make, pack([(name, b"") for name in names]))[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [1, 40])
def test_names_that_are_not_utf_8(format: str, length: int) -> None:
    """Names are read as tarfile reads them, in each place that a name may have; so are the samples after them."""
    names = [b"one.txt", b"caf\xe9/" * (length - 1) + b"th\xe9.txt", b"two.txt"]
    archive = pack([(os.fsdecode(name), name) for name in names], FORMATS[format])
    samples, error = check_any_split(make, archive, [0.3, 0.6])
    assert error is None
    with tarfile.open(fileobj=io.BytesIO(archive)) as read_by_tarfile:
        assert [f"{sample['__key__']}.txt" for sample, _ in samples] == read_by_tarfile.getnames()
    assert [os.fsencode(sample["__key__"]) + b".txt" for sample, _ in samples] == names
    assert [sample["txt"] for sample, _ in samples] == names
    twice = pack([(os.fsdecode(name), b"") for name in [names[1], names[1]]], FORMATS[format])
    assert error_of(make, twice)[0].encode()


@pytest.mark.parametrize("end", [0, 100, 512, 600, 1536, 2560, 2561, 4096])
def test_truncated(end: int) -> None:
    """An archive without its end mark is an error, also where a member ends, and its last sample is not given."""
    samples, error = check_any_split(make, SMALL[:end], [0.5])
    assert [sample for sample, _ in samples] == WANTED[: (end >= 3072) + (end >= 3584)]
    assert error is not None
    assert "truncated" in error[0]
    assert error[1] == end


def test_max_sample_bytes_counts_the_whole_sample() -> None:
    """Many small members, or empty members with long names, count with the bytes they take in the archive."""
    archive = pack([(f"a.{n}", b"xy") for n in range(50)])
    limit = TarReader(URL, max_sample_bytes=50 * 514)
    assert len(samples_of(limit, archive)[0]) == 52
    text, offset = error_of(lambda _: TarReader(URL, max_sample_bytes=50 * 514 - 1), archive)
    assert "max_sample_bytes" in text
    assert offset == 49 * 1024
