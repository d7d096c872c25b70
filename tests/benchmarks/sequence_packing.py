"""How full packed rows are, beside TRL's `pack_dataset`, and tokens per second beside sequences that are only joined.

    python -m tests.benchmarks.sequence_packing [--rounds 5] [--number 20000]

*texts*: lognormal(4, 0.8), the lengths of the page on batching by length, up to 1,000 tokens. *documents*:
lognormal(6, 1), up to 2,048 tokens. TRL is left out where it is not installed; it packs a thousand sequences at a time.

Rates are of tokens in memory, so they show the loaders alone, which take turns; each row is the median of its rounds,
and the ratio that of the times in the same round. Every token is counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncloader import (
    DataLoader,
    Dataset,
    JoinSequences,
    PackedLoader,
    PackingSampler,
    PackSequences,
    SequenceRows,
    TokenBudgetBatchSampler,
)
from asyncloader.packing.bin_packing import STRATEGIES

WORKERS = 2
ROW = 4096
Lengths = npt.NDArray[np.int64]


def lengths_of(number: int) -> dict[str, Lengths]:
    """The lengths of each distribution."""
    draw = np.random.default_rng(0)
    return {
        "texts": draw.lognormal(4, 0.8, number).astype(np.int64).clip(1, 1000),
        "documents": draw.lognormal(6, 1.0, number).astype(np.int64).clip(1, 2048),
    }


def print_fills(name: str, lengths: Lengths, max_tokens: int) -> None:
    """Print how full each strategy's rows are."""
    rows = {strategy: len(PackingSampler(lengths, max_tokens, 0, strategy=strategy)) for strategy in STRATEGIES}  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    try:
        from datasets import Dataset as Table  # pyright: ignore[reportMissingImports]
        from trl import pack_dataset  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        table = Table.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
        rows |= {f"TRL {strategy}": len(pack_dataset(table, max_tokens, strategy)) for strategy in ("bfd", "wrapped")}
    for packer, number in rows.items():
        print(f"{name:9} {max_tokens:6} {packer:14} {lengths.sum() / (number * max_tokens):8.2%}")


class Texts(Dataset[Any]):
    """Sequences of tokens in memory."""

    def __init__(self, lengths: Lengths) -> None:
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        self.tokens = np.arange(int(self.ends[-1])).astype(np.uint16)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[self.starts[index] : self.ends[index]]


def join(samples: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Lay the sequences of a batch one behind the other, without anything else."""
    return {"tokens": torch.from_numpy(np.concatenate(samples))}


def loaders(lengths: Lengths) -> dict[str, Callable[[], tuple[DataLoader[Any], Iterable[Any]]]]:
    """Each way to make rows: the loader to close, and the rows."""
    texts = Texts(lengths)

    def unpacked() -> tuple[DataLoader[Any], Iterable[Any]]:
        sampler = TokenBudgetBatchSampler(lengths, ROW, 0, padding=False)
        loader = DataLoader[Any](texts, batch_sampler=sampler, collate_fn=join, num_workers=WORKERS)
        return loader, loader

    def planned() -> tuple[DataLoader[Any], Iterable[Any]]:
        loader = DataLoader[Any](
            SequenceRows(texts),
            batch_size=1,
            sampler=PackingSampler(lengths, ROW, 0),
            collate_fn=PackSequences(),
            num_workers=WORKERS,
        )
        return loader, loader

    def streamed() -> tuple[DataLoader[Any], Iterable[Any]]:
        loader = DataLoader[Any](texts, batch_size=1000, collate_fn=JoinSequences(ROW), num_workers=WORKERS)
        return loader, PackedLoader(loader)

    return {"joined, not packed": unpacked, "PackingSampler": planned, "PackedLoader": streamed}


def seconds(make: Callable[[], tuple[DataLoader[Any], Iterable[Any]]], tokens: int) -> float:
    """The time of an epoch, workers' start included.

    Raises:
        AssertionError: it had another number of tokens.
    """
    began = time.perf_counter()
    loader, rows = make()
    with loader:
        found = sum(row["tokens"].numel() for row in rows)
    assert found == tokens, f"{found} tokens came of {tokens}"
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--number", type=int, default=20_000)
    given = parser.parse_args(arguments)
    for name, lengths in lengths_of(given.number).items():
        for max_tokens in (2048, ROW):
            print_fills(name, lengths, max_tokens)
    for name, lengths in lengths_of(given.number).items():
        tokens, ways = int(lengths.sum()), loaders(lengths)
        rounds = [[seconds(make, tokens) for make in ways.values()] for _ in range(given.rounds)]
        for way, times in zip(ways, zip(*rounds, strict=True), strict=True):
            ratios = [first[0] / own for first, own in zip(rounds, times, strict=True)]
            print(
                f"{name:9} {way:20} {tokens / statistics.median(times) / 1e6:7.2f} million tokens/s, ratio "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
