"""Small shards of every format, whose samples count in their field ``n``; used by the tests of remote datasets."""

from __future__ import annotations

import gzip
import io
import json
import struct
import sys
import tarfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncloader.formats import Located, MdsShard, ShardFormat, parse_mds_index
from asyncloader.formats.tfrecord import crc32c, mask_crc
from asyncloader.remote.catalog import Shard, format_of
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from tests.unit.formats.mds_writer import shard_entry, write_index, write_shard

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import zstandard as zstd

COLUMNS = {"n": "int", "text": "str"}


def zstd_compress(data: bytes) -> bytes:
    packed: bytes = zstd.compress(data)
    return packed


def tar(numbers: Sequence[int], *, size: int = 10) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in numbers:
            for field, data in (("n", str(number).encode()), ("bin", bytes(size))):
                member = tarfile.TarInfo(f"{number:06d}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def jsonl(numbers: Sequence[int], *, size: int = 10) -> bytes:
    return b"".join(json.dumps({"n": number, "text": "x" * size}).encode() + b"\n" for number in numbers)


def tfrecord(numbers: Sequence[int]) -> bytes:
    parts: list[bytes] = []
    for number in numbers:
        head, data = struct.pack("<Q", len(str(number))), str(number).encode()
        parts += [head, struct.pack("<I", mask_crc(crc32c(head))), data, struct.pack("<I", mask_crc(crc32c(data)))]
    return b"".join(parts)


def parquet(numbers: Sequence[int], *, group: int = 7, size: int = 10, **options: Any) -> bytes:
    file = io.BytesIO()
    table = pa.table({"n": pa.array(list(numbers), pa.int64()), "text": [f"{n:x}" * size for n in numbers]})
    pq.write_table(table, file, row_group_size=group, **options)
    return file.getvalue()


def mds(numbers: Sequence[int]) -> bytes:
    return write_shard(COLUMNS, [{"n": number, "text": "x" * (number % 7)} for number in numbers])


def mds_index(*shards: bytes, counts: Sequence[int]) -> bytes:
    return write_index(
        *(
            shard_entry(COLUMNS, count, len(data), f"shard.{number:05d}.mds")
            for number, (data, count) in enumerate(zip(shards, counts, strict=True))
        )
    )


def mds_entry(numbers: Sequence[int]) -> MdsShard:
    (entry,) = parse_mds_index(mds_index(mds(numbers), counts=[len(numbers)]))
    return entry


MAKERS: dict[str, Callable[[Sequence[int]], bytes]] = {
    "a.tar": tar,
    "a.tar.gz": lambda numbers: gzip.compress(tar(numbers)),
    "a.jsonl": jsonl,
    "a.jsonl.gz": lambda numbers: gzip.compress(jsonl(numbers)),
    "a.jsonl.zst": lambda numbers: zstd_compress(jsonl(numbers)),
    "a.tfrecord": tfrecord,
    "a.parquet": parquet,
    "a.mds": mds,
}


def shard_of(url: str, numbers: Sequence[int]) -> Shard:
    """The shard with this URL, which its maker writes from `numbers`."""
    if url.endswith(".mds"):
        return Shard(url, ShardFormat("mds", None), mds=mds_entry(numbers))
    return Shard(url, format_of(url))


def number_of(sample: dict[str, Any]) -> int:
    """The number from which a sample was made, in any format."""
    return int(sample["n"] if "n" in sample else sample["record"])


async def drain(batches: AsyncGenerator[Sequence[Located], None], into: list[Located]) -> None:
    async with aclosing(batches) as lists:
        async for found in lists:
            assert found
            into += found


async def read_all(
    stores: Stores, shard: Shard, shard_range: CatalogRange | None = None, **options: Any
) -> list[Located]:
    found: list[Located] = []
    await drain(read_shard_range(stores, shard, shard_range or CatalogRange(0), **options), found)
    return found
