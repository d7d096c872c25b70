from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.options.checks import max_restarts
from asyncloader.options.objects import grouped

LOADERS = [DataLoader, AsyncDataLoader]


class Map:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class Endless:
    """A map dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 6


BAD: list[tuple[str, Any]] = [
    ("worker_timeout", 0),
    ("worker_timeout", -1.5),
    ("worker_timeout", math.nan),
    ("worker_timeout", "5"),
    ("worker_timeout", True),
    ("max_worker_restarts", -1),
    ("max_worker_restarts", 1.0),
    ("max_worker_restarts", "3"),
    ("max_worker_restarts", False),
    ("on_error", "ignore"),
    ("on_error", None),
    ("on_error", ["skip"]),
    ("max_skipped_samples", -1),
    ("max_skipped_samples", 0.5),
    ("max_skipped_samples", True),
    ("worker_memory_limit", 0),
    ("worker_memory_limit", -(1 << 30)),
    ("worker_memory_limit", 1e9),
    ("worker_memory_limit", True),
    ("worker_memory_limit", "8 giga"),
    ("allow_replay", "yes"),
]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("name", "value"), BAD, ids=[f"{name}={getattr(value, '__name__', value)!r}" for name, value in BAD]
)
def test_bad_values_are_refused(loader: Any, name: str, value: Any) -> None:
    """Both loaders raise a ValueError with the option's name and value, with workers and without."""
    for workers in (0, 2):
        with pytest.raises(ValueError, match=f"^{name} should be .*, but got {re.escape(f'{name}={value!r}')}$"):
            loader(Map(), num_workers=workers, **grouped({name: value}))


@pytest.mark.parametrize(
    ("given", "seeded", "number"), [(None, True, 3), (None, False, 0), (0, True, 0), (5, False, 5)]
)
def test_restarts(given: int | None, seeded: bool, number: int) -> None:
    """The number given; else 3 in seeded mode, where a recovered run is exact, and 0 without a seed."""
    assert max_restarts(given, seeded=seeded) == number


# ------------------------------------------------------------------------------------------------- refill


@pytest.mark.parametrize("loader", LOADERS)
def test_refill_without_a_seed_is_refused(loader: Any) -> None:
    """The substitutes are a function of the seed."""
    with pytest.raises(ValueError, match="on_error='refill' needs seed="):
        loader(Map(), on_error="refill")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dataset", [Endless(), Stream(), SizedStream()], ids=["endless", "stream", "sized stream"])
def test_refill_without_a_length_to_draw_from_is_refused(loader: Any, dataset: Any) -> None:
    """Substitutes are other samples of a map dataset, so its length must be known."""
    options: dict[str, Any] = {"sampler": range(4)} if isinstance(dataset, Endless) else {}
    with pytest.raises(ValueError, match="on_error='refill' needs a map dataset with a length"):
        loader(dataset, seed=1, on_error="refill", **options)
