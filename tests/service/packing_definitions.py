"""The definitions of sequences that are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset

import asyncloader

TEXT_LENGTHS = np.random.default_rng(0).integers(0, 50, 300).tolist()


def text_of_number(n: int) -> Any:
    """A sequence, with a field for each token, and a field of its own."""
    return {"tokens": np.arange(100 * n, 100 * n + TEXT_LENGTHS[n]), "id": n}


class Texts(Dataset[Any]):
    """Sequences of tokens."""

    def __len__(self) -> int:
        return len(TEXT_LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return text_of_number(index)


@asyncloader.definition
def windows(max_tokens: int = 128) -> Any:
    """Sequences that are packed where they are read."""
    return Texts(), {"collate_fn": asyncloader.JoinSequences(max_tokens)}


@asyncloader.definition
def window_shards(folder: str) -> Any:
    """A stream of sequences that are packed where they are read."""
    return asyncloader.RemoteIterableDataset(f"{folder}/", shuffle_buffer=50), {
        "decode": text_of_line,
        "collate_fn": asyncloader.JoinSequences(128, strategy="wrap"),
    }


def text_of_line(sample: Any) -> Any:
    """Return the sequence of a line."""
    return text_of_number(int(sample["n"]))
