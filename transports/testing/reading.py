"""Conformance tests of reading: the bytes, paths and versions that a transport returns, and the calls that it refuses.

Data path: none; see `asyncloader.transports.testing`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from asyncloader.transports.errors import InvalidPath, ObjectNotFound, ObjectTooLarge, RangeOutOfBounds, ReadFailed
from asyncloader.transports.testing.subject import CONTENT, Call, TransportSubject, call_each, check_bytes, drain

ILLEGAL_PATHS = ["", "/", "/a", "..", "../a", "a/..", "a/../b", "a//b", "a/", ".", "./a", "a/./b", "a\0b"]
ILLEGAL_PREFIXES = ["/", "/a", "../", "../a", "a/../b", "a//b", "./a", "a\0b"]


class ReadingConformance(TransportSubject):
    """Tests the methods of a transport that read."""

    # --- whole objects

    @pytest.mark.parametrize("size", [0, 1, 4096, 3 << 20])
    async def test_read_gives_what_was_put(self, size: int) -> None:
        """A whole read returns all bytes of an object and no more, from none to several MiB."""
        data = (CONTENT * (size // len(CONTENT) + 1))[:size]
        async with self.make() as transport:
            self.put(transport, "some/where/object.bin", data)
            found = await transport.read("some/where/object.bin")
            assert type(found) is bytes
            check_bytes(found, data)
            assert await transport.size("some/where/object.bin") == size
            assert (await transport.info("some/where/object.bin")).size == size
            check_bytes(b"".join(await drain(transport.stream("some/where/object.bin"))), data)

    @pytest.mark.parametrize(
        "path", ["a", "with space", "déjà/vu", "100%", "a+b", "x?y#z", "..a", "a..", ".hidden", "日本"]
    )
    async def test_names_are_taken_as_they_are(self, path: str) -> None:
        """No character of a legal path is escaped, unescaped or normalised."""
        async with self.make() as transport:
            self.put(transport, path, path.encode())
            assert await transport.read(path) == path.encode()
            assert await drain(transport.list()) == [path]

    async def test_read_sees_a_replaced_object(self) -> None:
        """A read returns the current bytes."""
        async with self.make() as transport:
            self.put(transport, "a", b"old")
            assert await transport.read("a") == b"old"
            self.put(transport, "a", b"newer")
            assert await transport.read("a") == b"newer"
            assert await transport.size("a") == 5

    async def test_max_bytes_refuses_one_byte_more(self) -> None:
        """An object of `max_bytes` is read; a larger object is refused, and the error has both sizes."""
        async with self.make() as transport:
            self.put(transport, "a", b"12345")
            assert await transport.read("a", max_bytes=5) == b"12345"
            with pytest.raises(ObjectTooLarge, match="'a' has 5 bytes, more than max_bytes=4") as caught:
                await transport.read("a", max_bytes=4)
            assert (caught.value.path, caught.value.size, caught.value.max_bytes) == ("a", 5, 4)
            with pytest.raises(ValueError, match="max_bytes must be 0 or more, got -1"):
                await transport.read("a", max_bytes=-1)

    # --- ranges

    @pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 16384), (100, 0), (255, 2), (16383, 1), (16384, 0)])
    async def test_read_range_gives_the_slice(self, start: int, length: int) -> None:
        """A range is the slice of the object, also at its ends and when it is empty."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            check_bytes(await transport.read_range("a", start, length), CONTENT[start : start + length])

    @pytest.mark.parametrize(("start", "length"), [(0, 16385), (16384, 1), (16380, 5), (1 << 40, 1), (0, 1 << 60)])
    async def test_range_past_the_end_is_an_error(self, start: int, length: int) -> None:
        """A range past the end is never a short result, and no memory is allocated for an impossible length."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            with pytest.raises(RangeOutOfBounds, match="'a'") as caught:
                await transport.read_range("a", start, length)
            assert caught.value.path == "a"
            assert caught.value.size in {len(CONTENT), None}
            with pytest.raises(RangeOutOfBounds):
                await transport.read_ranges("a", [(0, 1), (start, length)])

    @pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1)])
    async def test_negative_range_is_an_error(self, start: int, length: int) -> None:
        """A negative start is not counted from the end."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            with pytest.raises(ValueError, match="0 or more"):
                await transport.read_range("a", start, length)
            with pytest.raises(ValueError, match="0 or more"):
                await transport.read_ranges("a", [(start, length)])

    async def test_read_ranges_answers_in_the_order_asked(self) -> None:
        """Unsorted, repeated, overlapping, empty and distant ranges come back as their slices, in order."""
        ranges = [(9000, 10), (0, 5), (3, 5), (9000, 10), (7, 0), (0, 16384), (4096, 1), (16383, 1)]
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            answers = await transport.read_ranges("a", iter(ranges))
            for answer, (start, length) in zip(answers, ranges, strict=True):
                check_bytes(answer, CONTENT[start : start + length])

    async def test_read_ranges_far_apart(self) -> None:
        """Ranges that are too far apart for one request are each returned whole; no ranges give no bytes."""
        data = CONTENT * 400  # 6.25 MiB
        ranges = [(each, 3) for each in range(0, len(data) - 3, 2 << 20)]
        async with self.make() as transport:
            self.put(transport, "a", data)
            answers = await transport.read_ranges("a", ranges)
            assert list(answers) == [data[start : start + 3] for start, _ in ranges]
            assert list(await transport.read_ranges("a", [])) == []

    # --- streams

    @pytest.mark.parametrize("chunk_size", [1000, 16384, 1 << 20])
    async def test_stream_gives_all_chunks_in_order(self, chunk_size: int) -> None:
        """From byte `start` on the chunks join to the object's rest; none is empty or longer than asked."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            for start in [0, 1, 100, 8191, 16383, 16384]:
                chunks = await drain(transport.stream("a", start=start, chunk_size=chunk_size))
                check_bytes(b"".join(chunks), CONTENT[start:])
                assert all(0 < len(chunk) <= chunk_size for chunk in chunks)

    async def test_stream_refuses_impossible_arguments(self) -> None:
        """A chunk has at least one byte, and a negative start is not counted from the end."""
        async with self.make() as transport:
            self.put(transport, "a", b"1")
            with pytest.raises(ValueError, match="chunk_size must be at least 1 byte, got 0"):
                await drain(transport.stream("a", chunk_size=0))
            with pytest.raises(ValueError, match="start must be 0 or more bytes, got -1"):
                await drain(transport.stream("a", start=-1))

    @pytest.mark.parametrize("start", [16385, 1 << 40])
    async def test_stream_from_past_the_end_is_an_error(self, start: int) -> None:
        """A start after the end is refused: it belongs to another object or version."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            with pytest.raises(RangeOutOfBounds, match="'a'") as caught:
                await drain(transport.stream("a", start=start))
            assert (caught.value.path, caught.value.size) in {("a", len(CONTENT)), ("a", None)}
            check_bytes(await transport.read("a"), CONTENT)

    async def test_a_pinned_object_that_never_had_the_range(self) -> None:
        """Past the end of an object that was read before, and is the same, is an error of the range: it has not
        changed. Without a version that is not known.
        """
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            pinned = transport.pinned("a")
            check_bytes(b"".join(await drain(pinned.stream())), CONTENT)
            known = RangeOutOfBounds if pinned.etag is not None else (RangeOutOfBounds, ReadFailed)
            with pytest.raises(known, match="'a'"):
                await drain(pinned.stream(start=len(CONTENT) + 1))

    async def test_a_pinned_stream_goes_on_behind_its_stop(self) -> None:
        """A stop is no end: a consumer that reads on gets the rest. It may lie anywhere, also in an empty object."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            self.put(transport, "empty", b"")
            for stop in [0, 1, 5000, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 1]:
                for start in [0, 99]:
                    chunks = await drain(transport.pinned("a").stream(start=start, stop=stop, chunk_size=1000))
                    check_bytes(b"".join(chunks), CONTENT[start:])
                    assert all(0 < len(chunk) <= 1000 for chunk in chunks)
                assert await drain(transport.pinned("empty").stream(stop=stop)) == []

    async def test_stream_left_early_leaves_the_transport_usable(self) -> None:
        """A consumer may stop in the middle of a stream."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            async with aclosing(transport.stream("a", chunk_size=100)) as chunks:
                assert (await anext(chunks))[:1] == CONTENT[:1]
            check_bytes(await transport.read("a"), CONTENT)

    async def test_streams_do_not_disturb_each_other(self) -> None:
        """Two streams of one object have separate positions."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            both = await asyncio.gather(*(drain(transport.stream("a", chunk_size=n)) for n in (1000, 999)))
            for chunks in both:
                check_bytes(b"".join(chunks), CONTENT)

    # --- versions

    async def test_info_stands_for_the_bytes(self) -> None:
        """Other bytes at a path never have the same version, not even right after the change and at the same size."""
        async with self.make() as transport:
            seen: dict[str, bytes] = {}
            for data in [b"one", b"two", b"three", b"ten"]:
                self.put(transport, "a", data)
                for _ in range(2):
                    etag = (await transport.info("a")).etag
                    assert etag is None or seen.setdefault(etag, data) == data

    async def test_read_with_info_describes_what_it_gives(self) -> None:
        """The returned version is that of the returned bytes, or None; the limit applies."""
        async with self.make() as transport:
            for data in [CONTENT, CONTENT[::-1], b""]:
                self.put(transport, "a", data)
                found, info = await transport.read_with_info("a", max_bytes=len(CONTENT))
                check_bytes(found, data)
                assert info.size == len(data)
                assert info.etag in {(await transport.info("a")).etag, None}
            self.put(transport, "a", CONTENT)
            with pytest.raises(ObjectTooLarge, match="'a'"):
                await transport.read_with_info("a", max_bytes=len(CONTENT) - 1)

    # --- listing

    async def test_list_is_sorted_and_filtered_by_string_prefix(self) -> None:
        """Paths are sorted as strings; a prefix is the beginning of a string, not a directory."""
        paths = ["a.txt", "a/b", "a/b.d/e", "a/bb/c", "a0", "b/a", "ab/c", "Z", "é"]
        async with self.make() as transport:
            for path in paths:
                self.put(transport, path, b"1")
            everything = sorted(paths)
            assert await drain(transport.list()) == everything
            for prefix in ["a", "a/", "a/b", "a/b.", "a/bb/", "a/bb/c", "b", "é", "x", "a/x", "x/y/z", "a.txt/"]:
                expected = [path for path in everything if path.startswith(prefix)]
                assert await drain(transport.list(prefix)) == expected, prefix

    async def test_every_listed_path_can_be_read(self) -> None:
        """Every path from `list` can be read; the list of an empty store is empty."""
        async with self.make() as transport:
            assert await drain(transport.list()) == []
            for number in range(30):
                self.put(transport, f"{number % 3}/{number:02}.bin", str(number).encode())
            read = [int(await transport.read(path)) async for path in transport.list()]
            assert sorted(read) == list(range(30))

    # --- refused paths

    @call_each
    async def test_missing_object(self, call: Call) -> None:
        """A missing object raises ObjectNotFound, which is a FileNotFoundError, with the path in it."""
        async with self.make() as transport:
            self.put(transport, "dir/a", b"12345")
            for path in ["b", "dir", "dir/b", "dir/a/b"]:
                with pytest.raises(ObjectNotFound, match=f"{path}'") as caught:
                    await call(transport, path)
                assert isinstance(caught.value, FileNotFoundError)
                assert caught.value.path == path

    @call_each
    async def test_illegal_paths(self, call: Call) -> None:
        """A path that is absolute, climbs out of the root or is not canonical is refused everywhere."""
        async with self.make() as transport:
            self.put(transport, "a", b"12345")
            for path in ILLEGAL_PATHS:
                with pytest.raises(InvalidPath) as caught:
                    await call(transport, path)
                assert isinstance(caught.value, ValueError)
                assert caught.value.path == path

    async def test_illegal_prefixes(self) -> None:
        """A prefix that no legal path begins with is refused: a typing error must not look like an empty store."""
        async with self.make() as transport:
            for prefix in ILLEGAL_PREFIXES:
                with pytest.raises(InvalidPath):
                    await drain(transport.list(prefix))
