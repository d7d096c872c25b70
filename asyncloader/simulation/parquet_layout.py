"""Which requests a Parquet file is read by: decided by the reader itself, which is given no bytes. Pure.

Data path: footer -> [parquet_layout] -> contents, simulated_shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from asyncloader.formats.parquet import LARGEST_PAGE, TAIL_BYTES, Footer, RowGroups
from asyncloader.transports.ranges import ReadPlan

MOST_CHUNKS = 100_000
"""Column chunks of a file that are looked at; its other row groups are taken to be like these."""


class GroupReads(NamedTuple):
    """The requests for one row group.

    Attributes:
        first: bytes of each request for the first windows, which are sent together.
        later: of each column chunk that has more, the bytes behind its first window, and those of a further request.
        whole: all its bytes are in the first windows, so the next group's windows are requested early.
    """

    first: tuple[int, ...]
    later: tuple[tuple[int, int], ...]
    whole: bool

    @property
    def requests(self) -> int:
        """Number of all requests."""
        return len(self.first) + sum(-(-rest // size) for rest, size in self.later)

    @property
    def nbytes(self) -> int:
        """Bytes of all answers."""
        return sum(self.first) + sum(rest for rest, _ in self.later)

    def rounds(self) -> Iterator[list[int]]:
        """Yield the bytes of the further requests of all chunks, which are decoded side by side."""
        left = [rest for rest, _ in self.later]
        while any(left):
            sizes = [min(rest, size) for rest, (_, size) in zip(left, self.later, strict=True)]
            left = [rest - size for rest, size in zip(left, sizes, strict=True)]
            yield [size for size in sizes if size]


class ParquetLayout(NamedTuple):
    """The requests for a file.

    Attributes:
        footer: bytes of the answers before the first row group: none for the size of the file, then the footer.
        edges: the number of each row group's first row, and of all rows.
        groups: the requests of the row groups; of a file with very many, of the first row groups.
    """

    footer: tuple[int, ...]
    edges: tuple[int, ...]
    groups: tuple[GroupReads, ...]

    def wanted(self, start: int, stop: int | None) -> list[int]:
        """Return the numbers of the row groups that contain rows ``[start, stop)``."""
        last = self.edges[-1] if stop is None else min(stop, self.edges[-1])
        return [
            number
            for number, (first, after) in enumerate(zip(self.edges, self.edges[1:], strict=False))
            if first < last and max(start, first) < after
        ]

    def group(self, number: int) -> GroupReads:
        """Return the requests of a row group."""
        return self.groups[number % len(self.groups)]


def layout_of(
    footer: Footer, plan: Callable[[Iterable[tuple[int, int]]], ReadPlan], window_bytes: int
) -> ParquetLayout:
    """Return the requests by which all columns of a file are read.

    Args:
        footer: the file's.
        plan: of the transport: which ranges it joins.
        window_bytes: that are fetched ahead of decoding.

    Raises:
        ShardError: the file is damaged.
    """
    asked: list[tuple[int, int]] = []

    def fetch(ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
        asked.extend(ranges)
        return Future()

    groups = RowGroups(footer, fetch, None, LARGEST_PAGE, window_bytes)
    found: list[GroupReads] = []
    chunks = 0
    for number in range(len(footer.edges) - 1):
        asked.clear()
        group, windows = groups.begin(number)
        later = tuple((rest, size) for rest, size in windows.later() if rest)
        found.append(GroupReads(tuple(block.length for block in plan(asked).blocks), later, windows.whole))
        chunks += max(1, len(group.chunks))
        if chunks > MOST_CHUNKS:
            break
    tail, whole = min(TAIL_BYTES, footer.size), footer.size - footer.end
    footers = (0, tail) if whole <= tail else (0, tail, whole - tail)
    return ParquetLayout(footers, footer.edges, tuple(found))
