"""Items per second of MultiProcessingReadingService with two workers, here and in torchdata 0.9.0, interleaved.

python -m tests.dataloader2_reference.speed
"""

from __future__ import annotations

import statistics
import sys
from time import perf_counter
from typing import Any

import torch
from torch.utils.data.datapipes.iter import IterableWrapper

WORKERS = 2
ROUNDS = 5
# Bytes of an item, items of an epoch.
SIZES = {"1 KB": (1 << 10, 20_000), "1 MB": (1 << 20, 1_000)}


class Item:
    """Makes a tensor full of the item's number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, number: int) -> torch.Tensor:
        return torch.full((self.size // 8,), number, dtype=torch.int64)


def seconds(kind: Any, service: Any, size: int, items: int) -> float:
    """Return the seconds of the second epoch: the workers start in the first."""
    graph = IterableWrapper(range(items)).sharding_filter().map(Item(size))
    loader = kind(graph, reading_service=service(num_workers=WORKERS))
    for _ in loader:
        pass
    begin = perf_counter()
    read = 0
    for item in loader:
        assert item[0] == read == item[-1]
        read += 1
    took = perf_counter() - begin
    assert read == items
    loader.shutdown()
    return took


def main() -> None:
    """Print a table: medians of five rounds, in which each library has its turn."""
    import torchdata.dataloader2 as theirs

    import asyncloader.dataloader2 as ours

    names = {"asyncloader": ours, "torchdata 0.9.0": theirs}
    for label, (size, items) in SIZES.items():
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name, module in names.items():
                took = seconds(module.DataLoader2, module.MultiProcessingReadingService, size, items)
                found[name].append(items / took)
        rates = {name: statistics.median(values) for name, values in found.items()}
        mine, other = rates.values()
        spread = ", ".join(f"{name} {min(v):,.0f} to {max(v):,.0f}" for name, v in found.items())
        sys.stdout.write(f"{label}: {mine:,.0f} against {other:,.0f} items/s, {mine / other:.1f} x ({spread})\n")


if __name__ == "__main__":
    main()
