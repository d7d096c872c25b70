"""The points of the curves of `growth.py`: what grows, and how far. Imports nothing that takes long."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

OURS, TORCH = "DataLoader", "torch"
LOADERS = (TORCH, OURS)

WORKERS = (1, 2, 4, 8, 16, 32, 64)
BATCH_BYTES = (1 << 10, 32 << 10, 1 << 20, 32 << 20, 512 << 20)
SAMPLES = (10, 10**3, 10**5, 10**7, 10**9)
TORCH_SAMPLES = 10**7
"""torch makes a list of a shuffled epoch's indices: 72 GB for 10^9."""

BATCH_SIZE = 32
PLAIN_WORKERS, PLAIN_BYTES, PLAIN_SAMPLES = 2, 32 << 10, 10**6
DAY = 864_000
"""Batches of a day of training at 10 a second."""


@dataclass(frozen=True)
class Point:
    """One point of a curve.

    Args:
        loader: whose.
        workers: worker processes.
        item_bytes: size of a sample.
        samples: size of the dataset.
        seconds: how long the clock runs.
        batch_size: samples in a batch.
    """

    loader: str
    workers: int = PLAIN_WORKERS
    item_bytes: int = PLAIN_BYTES // BATCH_SIZE
    samples: int = PLAIN_SAMPLES
    seconds: float = 1.0
    batch_size: int = BATCH_SIZE

    def to_json(self) -> str:
        """The JSON of its fields."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Soak:
    """A run of many batches of one int64 a sample.

    Args:
        loader: whose.
        epochs: how many; at least 4.
        batches: in each.
        workers: worker processes.
        batch_size: samples in a batch.
    """

    loader: str
    epochs: int
    batches: int
    workers: int = 2
    batch_size: int = 4

    def to_json(self) -> str:
        """The JSON of its fields."""
        return json.dumps(dataclasses.asdict(self))


CURVES: dict[str, tuple[str, tuple[int, ...]]] = {
    "workers": ("worker processes", WORKERS),
    "batch": ("bytes of a batch", BATCH_BYTES),
    "samples": ("samples of the dataset", SAMPLES),
}
"""Each curve: the title of its horizontal axis, and the values there."""


def point(curve: str, value: int, loader: str, seconds: float) -> Point | None:
    """The point of a curve; None where the loader cannot do it."""
    if curve == "workers":
        return Point(loader, workers=value, seconds=seconds)
    if curve == "batch":
        return Point(loader, item_bytes=value // BATCH_SIZE, seconds=seconds)
    if loader == TORCH and value > TORCH_SAMPLES:
        return None
    return Point(loader, samples=value, seconds=seconds)


def soaks(quick: bool) -> list[Soak]:
    """A day of training; for torch, which takes longer for a batch, a tenth of it."""
    batches = DAY // 20 // (100 if quick else 1)
    return [Soak(OURS, 20, batches), Soak(TORCH, 4, batches // 2)]
