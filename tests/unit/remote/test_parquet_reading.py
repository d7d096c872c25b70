"""Row groups that several streams read at the same time: each gets its rows, and the bytes are read once."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import LocatedSamples, OnBad, ShardError
from asyncloader.formats import parquet as parquet_format
from asyncloader.formats.parquet import RowOptions
from asyncloader.remote.parquet_reading import SharedRows, read_parquet
from asyncloader.transports import MemoryTransport, PinnedReader, ReadFailed
from tests.drawn import scaled
from tests.unit.remote.shards import parquet

URL = "a.parquet"
OPTIONS = RowOptions(None, 1 << 30, 1 << 20)
ROWS = 40


class Counted(MemoryTransport):
    """Counts the bytes of its answers, and fails the reads whose numbers are in `failing`."""

    read_bytes = reads = 0
    failing: Sequence[int] = ()

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        self.reads += 1
        if self.reads in self.failing:
            raise ReadFailed("the network is gone", path=path)
        found = await super().read_ranges(path, ranges)
        self.read_bytes += sum(map(len, found))
        return found


def rows_of(
    pinned: PinnedReader, tables: SharedRows, start: int, stop: int, on_bad: OnBad | None = None
) -> AsyncGenerator[LocatedSamples, None]:
    return read_parquet(pinned, URL, options=OPTIONS, start=start, stop=stop, on_bad=on_bad, shared=tables)


async def numbers_of(rows: AsyncGenerator[LocatedSamples, None]) -> list[int]:
    async with aclosing(rows):
        return [sample["n"] async for found in rows for sample in found.samples]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow decodes few rows at a time."""
    monkeypatch.setattr(parquet_format, "MOST_ROWS", 3)


@pytest.mark.parametrize(("most", "times"), [(8 << 20, 1), (0, 2)])
async def test_bytes_are_read_once(most: int, times: int) -> None:
    """Four streams read a quarter of a row group each. If no rows may be kept, each reads the row group itself."""
    data = parquet(range(ROWS), group=ROWS, size=5000, compression="none", use_dictionary=False)
    async with Counted({URL: data}) as transport:
        pinned, tables = transport.pinned(URL), SharedRows(most)
        quarters = [range(first, first + 10) for first in range(0, ROWS, 10)]
        reading = [rows_of(pinned, tables, each.start, each.stop) for each in quarters]
        found = await asyncio.gather(*map(numbers_of, reading))
        assert found == [list(each) for each in quarters]
        assert transport.read_bytes >= times * len(data)
        if times == 1:
            assert transport.read_bytes < 1.5 * len(data)


@settings(max_examples=scaled(40), deadline=None)
@given(st.data())
def test_any_streams(data: st.DataObject) -> None:
    """However the reads follow one another, and whatever is kept, each stream gets its rows; some are left early."""
    group = data.draw(st.integers(1, ROWS))
    parts = data.draw(st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted), max_size=6))
    most = data.draw(st.sampled_from([0, 100, 1000, 1 << 20]))
    turns = data.draw(st.lists(st.integers(0, 5), max_size=40))
    left_early = data.draw(st.sets(st.integers(0, 5)))

    async def run() -> None:
        async with MemoryTransport({URL: parquet(range(ROWS), group=group)}) as transport:
            pinned, tables = transport.pinned(URL), SharedRows(most)
            reading = [rows_of(pinned, tables, start, stop) for start, stop in parts]
            found: list[list[int]] = [[] for _ in parts]
            for turn in turns:
                if turn < len(parts) and (rows := await anext(reading[turn], None)) is not None:
                    found[turn] += [sample["n"] for sample in rows.samples]
            for number, (start, stop) in enumerate(parts):
                if number in left_early:
                    await reading[number].aclose()
                    assert found[number] == list(range(start, stop))[: len(found[number])]
            for number, (start, stop) in enumerate(parts):
                if number not in left_early:
                    assert found[number] + await numbers_of(reading[number]) == list(range(start, stop))

    asyncio.run(run())


async def test_an_error_is_raised_once() -> None:
    """A read that fails is the error of the stream that asked for it; the others read for themselves."""
    data = parquet(range(ROWS), group=ROWS, size=5000, compression="none", use_dictionary=False)
    async with Counted({URL: data}) as transport:
        transport.failing = [2]  # after the footer
        pinned, tables = transport.pinned(URL), SharedRows()
        reading = [rows_of(pinned, tables, first, first + 10) for first in (0, 10, 20)]
        found = await asyncio.gather(*map(numbers_of, reading), return_exceptions=True)
        assert [type(each) for each in found].count(ReadFailed) == 1
        assert [each for each in found if isinstance(each, list)] == [
            list(range(first, first + 10))
            for first, each in zip((0, 10, 20), found, strict=True)
            if isinstance(each, list)
        ]


async def test_bad_rows() -> None:
    """A row without a Python form is reported to the stream that reads it, or is its error, after the rows before."""
    file = io.BytesIO()
    days = pa.array([0] * 14 + [4_000_000] + [0] * 5, pa.date32())  # beyond the year 9999
    pq.write_table(pa.table({"n": list(range(20)), "day": days}), file)
    async with MemoryTransport({URL: file.getvalue()}) as transport:
        pinned, tables = transport.pinned(URL), SharedRows()
        bad: list[ShardError] = []
        first, second = [], list[int]()
        async with (
            aclosing(rows_of(pinned, tables, 0, 12)) as before,
            aclosing(rows_of(pinned, tables, 12, 19, on_bad=bad.append)) as tolerant,
            aclosing(rows_of(pinned, tables, 12, 20)) as strict,
        ):
            async for rows in before:
                first += [sample["n"] for sample in rows.samples]
            async for rows in tolerant:
                second += [sample["n"] for sample in rows.samples]
            third = [sample["n"] for _ in range(2) for sample in (await anext(strict)).samples]
            with pytest.raises(ShardError, match="row 14 has a value with no Python form"):
                await anext(strict)
        assert first == list(range(12))
        assert second == [12, 13, 15, 16, 17, 18]
        assert third == [12, 13]
        assert [error.resume for error in bad] == [15]


async def test_a_stream_is_cancelled() -> None:
    """The other streams of its row group go on."""
    async with MemoryTransport({URL: parquet(range(ROWS), group=ROWS, size=5000)}) as transport:
        pinned, tables = transport.pinned(URL), SharedRows()
        others = [asyncio.create_task(numbers_of(rows_of(pinned, tables, at, at + 10))) for at in (0, 30)]
        first = asyncio.create_task(numbers_of(rows_of(pinned, tables, 10, 20)))
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.gather(*others) == [list(range(10)), list(range(30, 40))]
        with pytest.raises(asyncio.CancelledError):
            await first
