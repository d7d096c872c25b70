"""MDS datasets that MosaicML's own writer made (``tests/data/mds``) are read whole, by their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncloader import RemoteIterableDataset

DATA = Path(__file__).parents[2] / "data" / "mds"


def expected(number: int) -> dict[str, Any]:
    """The sample that the writer was given."""
    return {
        "number": number,
        "text": f"sample {number} ü",
        "data": bytes(range(number)),
        "weight": np.float32(number / 4),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3) + number,
        "any": np.full((number % 3 + 1, 2), number, np.float64),
    }


def same(sample: dict[str, Any]) -> bool:
    """Whether a sample equals the sample written under its number."""
    return all(
        np.array_equal(sample[name], value) and getattr(sample[name], "dtype", None) == getattr(value, "dtype", None)
        for name, value in expected(int(sample["number"])).items()
    )


@pytest.mark.parametrize("kind", ["plain", "zstd"])
async def test_samples_are_what_was_written(kind: str) -> None:
    """Every field of every sample, in order, with its type; the length is the index's."""
    dataset = RemoteIterableDataset(str(DATA / kind))
    samples = [sample async for sample in dataset]
    assert [sample["number"] for sample in samples] == list(range(12))
    assert all(map(same, samples))
    assert len(dataset) == 12
