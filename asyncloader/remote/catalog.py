"""Which shards there are, and which part of one a worker reads at a time. Pure.

Data path: URLs -> [catalogue: shards, pieces] -> leases -> one piece at a time -> samples.

Where there are fewer shards than workers, shards are cut into pieces: JSON lines by bytes, MDS and Parquet at the
places that `Shard.edges` names. The others cannot be cut without an index of them, and are read whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from asyncloader.formats import MdsShard, ShardFormat, ShardRange, cut_shard, shard_format
from asyncloader.formats.base import base_name

__all__ = ["PARQUET", "Piece", "Shard", "bytes_left", "can_cut", "cut", "format_of", "grouped", "named_format"]

PARQUET = ShardFormat("parquet", None)
"""The format that no push reader reads: see `formats.parquet`."""

GROUP_BYTES = 32 << 20
"""Pieces are leased together up to so many bytes: 0.3 s at 100 MB/s."""

GROUP_PIECES = 8
"""Pieces that are leased together at most."""

GROUPS_EACH = 4
"""Leases for each lane, at least, before pieces are grouped: enough to even out the end."""

PARQUET_ENDINGS = (".parquet", ".pq")


class Shard(NamedTuple):
    """One object that holds samples. Plain values: it pickles, and two of the same are equal.

    Attributes:
        url: full URL, or the path below a transport of the user's own; the shard's name everywhere.
        format: how it is read.
        size: bytes of the object, if known.
        samples: how many it holds, if an index says so.
        mds: what an MDS index says of it.
        edges: where it can be cut, ascending, its beginning and end included: offsets (MDS) or rows (Parquet). None:
            not known, or by its size (JSON lines), or nowhere.
    """

    url: str
    format: ShardFormat
    size: int | None = None
    samples: int | None = None
    mds: MdsShard | None = None
    edges: tuple[int, ...] | None = None


class Piece(NamedTuple):
    """A part of a shard. Plain integers, so that it can stand in a state.

    Attributes:
        shard: its number in the catalogue.
        start: where reading begins: bytes; rows, in Parquet.
        stop: samples that begin at this place or after it belong to another piece. None: to the end.
        sync: `start` may lie inside a sample, which then belongs to the piece before.
    """

    shard: int
    start: int = 0
    stop: int | None = None
    sync: bool = False


def named_format(format: ShardFormat | str | None) -> ShardFormat | None:
    """The format that a name says: ``"tar"``, ``"jsonl.gz"``, ``"parquet"``; an extension without its dot.

    Raises:
        ValueError: no format has this name.
    """
    return format_of(f"shard.{format}") if isinstance(format, str) else format


def format_of(url: str) -> ShardFormat:
    """The format that the extension of `url` says. As `formats.shard_format`, and Parquet.

    Raises:
        ValueError: no known extension.
    """
    if not url.lower().startswith(("http://", "https://")):
        # Elsewhere "?" and "#" may be characters of a name: the end of it says more than what is before them.
        name = url.rpartition("/")[2]
        if name and name != base_name(url):
            with suppress(ValueError):
                return format_of(name)
    return PARQUET if base_name(url).lower().endswith(PARQUET_ENDINGS) else shard_format(url)


def can_cut(shard: Shard) -> bool:
    """Whether a shard can be cut, once its size (JSON lines) or its edges (MDS, Parquet) are known."""
    if shard.format.name == "mds":
        return shard.mds is not None and shard.mds.compression is None and shard.mds.samples > 1
    return shard.format in (PARQUET, ShardFormat("jsonl", None))


def cut(shards: Sequence[Shard], parts: int) -> list[Piece]:
    """Cut `shards` into `parts` pieces, or more; fewer, where formats and sizes allow no more.

    One piece a shard if there are enough shards. Otherwise the largest pieces are cut first, so that the pieces of
    different shards differ little in size. Every sample is in exactly one piece. Shards are cut by what is known of
    them (`Shard.size`, `Shard.edges`): see `measuring.measure`.

    Returns:
        The pieces in the order of the shards and, within one, ascending.

    Raises:
        ValueError: `parts` is below 1.
    """
    if parts < 1:
        raise ValueError(f"cannot cut shards into {parts} parts")
    counts = [1] * len(shards)
    most = [_most_parts(shard) for shard in shards]
    # The piece that is largest now, then the earlier shard.
    heap = [(-_weight(shard), number) for number, shard in enumerate(shards) if most[number] > 1]
    heapq.heapify(heap)
    for _ in range(parts - len(shards)):
        if not heap:
            break
        _, number = heap[0]
        counts[number] += 1
        if counts[number] < most[number]:
            heapq.heapreplace(heap, (-_weight(shards[number]) / counts[number], number))
        else:
            heapq.heappop(heap)
    return [
        Piece(number, start, stop, sync)
        for number, shard in enumerate(shards)
        for start, stop, sync in _ranges(shard, counts[number])
    ]


def _weight(shard: Shard) -> float:
    return float(shard.size or (shard.mds.size if shard.mds is not None else 0))


def _most_parts(shard: Shard) -> int:
    """Pieces that a shard can be cut into at most, by what is known of it."""
    if not can_cut(shard):
        return 1
    if shard.edges is not None:
        return max(1, len(shard.edges) - 1)
    return max(1, shard.size or 1) if shard.format.name == "jsonl" else 1


def _ranges(shard: Shard, parts: int) -> list[ShardRange]:
    if parts == 1:
        return [ShardRange(0, None, sync=False)]
    if shard.edges is None:
        return cut_shard(shard.format, shard.size or 0, parts)
    edges, last = shard.edges, len(shard.edges) - 1
    at = [edges[last * part // parts] for part in range(parts)]
    # The first piece begins with the shard, what is before its first sample included; the last one ends with it.
    starts, stops = [0, *at[1:]], [*at[1:], None]
    return [ShardRange(start, stop, sync=False) for start, stop in zip(starts, stops, strict=True)]


def bytes_left(shard: Shard, piece: Piece) -> int | None:
    """Bytes of the object that a piece takes; None if nobody knows, or its places are not bytes of the object."""
    packed = shard.format.compression or (shard.mds is not None and shard.mds.compression)
    if packed or shard.format == PARQUET:
        return None if piece.start or piece.stop is not None else shard.size
    stop = shard.size if piece.stop is None else piece.stop
    return None if stop is None else max(0, stop - piece.start)


def grouped(pieces: Sequence[Piece], shards: Sequence[Shard], lanes: int) -> list[tuple[Piece, ...]]:
    """Leases: small neighbours together, as long as there are enough leases for every lane to be kept even.

    A lane opens the pieces of a lease before their time, so that small ones do not cost a round trip each.
    """
    most = min(GROUP_PIECES, len(pieces) // (GROUPS_EACH * lanes))
    leases: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    room = GROUP_BYTES
    for piece in pieces:
        size = bytes_left(shards[piece.shard], piece)
        if group and (len(group) >= most or size is None or size > room):
            leases.append(tuple(group))
            group, room = [], GROUP_BYTES
        group.append(piece)
        room -= room if size is None else size
    return [*leases, tuple(group)] if group else leases
