"""`write_shards` refuses stores, arguments and samples before it writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import Buffer

from asyncloader import ShardWriteError, write_shards
from asyncloader.transports import AccessDenied, MemoryTransport, ObjectInfo, WriteFailed
from tests.integration.remote.test_write_shards import samples_of


async def test_a_store_for_reading_only() -> None:
    """It is refused before a sample is encoded."""
    with pytest.raises((WriteFailed, AccessDenied), match="for reading only"):
        await write_shards(samples_of("tar"), "x/train-{shard}.tar", transport=ReadOnly())
    # Not asked for anything: nothing listens there.
    with pytest.raises(WriteFailed, match="for reading only"):
        await write_shards(samples_of("tar"), "http://127.0.0.1:9/train-{shard}.tar")


class ReadOnly(MemoryTransport):
    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        return await super(MemoryTransport, self).write(path, pieces)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_bytes": 0}, "max_bytes should be"),
        ({"max_samples": 0}, "max_samples should be"),
        ({"buffer_bytes": "x"}, "buffer_bytes should be"),
        ({"workers": -1}, "workers should be"),
        ({"workers": 2}, "samples is an iterable"),
        ({"columns": {"a": "int"}}, "tar has none"),
        ({"format": "jsonl"}, "does not end with the extension"),
    ],
)
async def test_arguments_are_checked(options: dict[str, Any], text: str) -> None:
    """Each is named, with its value."""
    with pytest.raises(ValueError, match=text):
        await write_shards(samples_of("tar"), "train-{shard}.tar", transport=MemoryTransport(), **options)


async def test_samples_and_limits_are_checked() -> None:
    """What is no source of samples; more than a format can hold; a first sample without a type."""
    with pytest.raises(TypeError, match="neither an iterable of samples nor a map dataset"):
        await write_shards(3, "train-{shard}.tar", transport=MemoryTransport())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than mds allows"):
        await write_shards(samples_of("mds"), "{shard}.mds", transport=MemoryTransport(), max_bytes="4GiB")
    with pytest.raises(ShardWriteError, match="sample 0 cannot be written: its field 'a' is a object"):
        await write_shards([{"a": object()}], "{shard}.mds", transport=MemoryTransport())


@pytest.mark.parametrize("format", ["tar", "mds", "parquet"])
async def test_no_dictionary_of_names(format: str) -> None:
    """Is an error of the sample, also of the first, whose columns are looked for."""
    none: Any
    for none, text in (([3], "it is a int; a sample is a dictionary"), ([{"__key__": "a", 1: b"2"}], "its field 1 ")):
        with pytest.raises(ShardWriteError, match=f"sample 0 .*cannot be written: .*{text}"):
            await write_shards(none, f"{{shard}}.{format}", transport=MemoryTransport())
