from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.errors import ShardWriteError
from asyncloader.formats.jsonl import JsonlEncoder
from asyncloader.formats.tar import TarEncoder
from asyncloader.remote.shard_cutting import CutShard, ShardCutter


class Table(JsonlEncoder):
    """A format with a head and an entry for each sample, as MDS has."""

    base_bytes = 20
    sample_bytes = 4


def cut(samples: list[dict[str, Any]], groups: list[int], max_bytes: int, max_samples: int | None) -> list[CutShard]:
    """The shards of samples that are encoded in groups of these numbers."""
    encoder = Table()
    cutter = ShardCutter(encoder, max_bytes, max_samples)
    found: list[CutShard] = []
    rest = samples
    for group in [*groups, len(samples)]:
        found += cutter.add(encoder.encode(rest[:group]))
        rest = rest[group:]
    return [*found, *cutter.end()]


@given(
    st.lists(st.integers(0, 60).map(lambda length: {"a": "x" * length}), max_size=30),
    st.lists(st.integers(0, 9), max_size=9),
    st.integers(93, 400),
    st.none() | st.integers(1, 9),
)
def test_cuts_depend_on_the_samples_alone(
    samples: list[dict[str, Any]], groups: list[int], max_bytes: int, max_samples: int | None
) -> None:
    """No grouping changes a cut; every sample is in one shard, in order; and no shard could take the next sample."""
    found = cut(samples, groups, max_bytes, max_samples)
    sizes = [len(sample["a"]) + 9 + 4 for sample in samples]
    first = 0
    expected: list[tuple[int, int, int]] = []
    while first < len(samples):
        stop, size = first, 20
        while stop < len(samples) and size + sizes[stop] <= max_bytes and stop - first != max_samples:
            size += sizes[stop]
            stop += 1
        expected.append((first, stop - first, size))
        first = stop
    assert [(each.first, each.samples, each.size) for each in found] == expected
    assert [each.number for each in found] == list(range(len(found)))
    lines = [bytes(piece) for each in found for piece in Table().assemble(each.parts)]
    assert b"".join(lines) == b"".join(Table().encode(samples).data)


def test_a_sample_larger_than_a_shard() -> None:
    """The error has its number among all samples; those before it are not lost."""
    encoder, before = TarEncoder(), list[CutShard]()
    cutter = ShardCutter(encoder, 4096, None, sample=100)
    assert [*cutter.add(encoder.encode([{"__key__": "a", "x": b""}]))] == []
    with pytest.raises(
        ShardWriteError, match=r"^sample 102 \('c'\) cannot be written: it takes a shard of 6,656 bytes"
    ):
        before.extend(cutter.add(encoder.encode([{"__key__": "b", "x": b""}, {"__key__": "c", "x": bytes(5000)}])))
    assert [each.samples for each in before] == [2]


def test_a_key_occurs_once_in_a_shard() -> None:
    """Also in samples that do not follow one another; in the next shard it may occur again."""
    encoder = TarEncoder()
    samples = [{"__key__": key, "x": b""} for key in ("a", "b", "a")]
    cutter = ShardCutter(encoder, 1 << 20, None)
    with pytest.raises(ShardWriteError, match=r"^sample 2 \('a'\) cannot be written: another sample of the same shard"):
        list(cutter.add(encoder.encode(samples)))
    cutter = ShardCutter(encoder, 1 << 20, 2)
    assert [each.samples for each in [*cutter.add(encoder.encode(samples)), *cutter.end()]] == [2, 1]
