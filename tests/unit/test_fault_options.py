from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.epoch_config import max_restarts

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


def substitute(index: Any, error: Exception) -> Any:
    return index


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
    ("bad_samples", "drop"),
    ("bad_samples", None),
    ("max_bad_samples", -1),
    ("max_bad_samples", 0.5),
    ("max_bad_samples", True),
    ("worker_memory_limit", 0),
    ("worker_memory_limit", -(1 << 30)),
    ("worker_memory_limit", 1e9),
    ("worker_memory_limit", True),
]
GOOD: list[tuple[str, Any]] = [
    ("worker_timeout", None),
    ("worker_timeout", 5),
    ("worker_timeout", 0.25),
    ("worker_timeout", math.inf),
    ("max_worker_restarts", None),
    ("max_worker_restarts", 0),
    ("max_worker_restarts", 7),
    ("on_error", "raise"),
    ("on_error", "skip"),
    ("on_error", substitute),
    ("bad_samples", "short"),
    ("max_bad_samples", None),
    ("max_bad_samples", 0),
    ("worker_memory_limit", None),
    ("worker_memory_limit", 1),
    ("worker_memory_limit", 1 << 40),
]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("name", "value"), BAD, ids=[f"{name}={getattr(value, '__name__', value)!r}" for name, value in BAD]
)
def test_bad_values_are_refused(loader: Any, name: str, value: Any) -> None:
    """A ValueError with the option's name and value, from both loaders, with workers or without."""
    for workers in (0, 2):
        with pytest.raises(ValueError, match=f"^{name} should be .*, but got {re.escape(f'{name}={value!r}')}$"):
            loader(Map(), num_workers=workers, **{name: value})


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dataset", [Map(), Stream()], ids=["map", "stream"])
@pytest.mark.parametrize(
    ("name", "value"), GOOD, ids=[f"{name}={getattr(value, '__name__', value)!r}" for name, value in GOOD]
)
def test_good_values_are_stored_as_they_are(loader: Any, dataset: Any, name: str, value: Any) -> None:
    """Under their own names, for either kind of dataset."""
    assert getattr(loader(dataset, **{name: value}), name) is value


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("seed", [None, 7])
def test_defaults(loader: Any, seed: int | None) -> None:
    """Nothing is killed, left out or retired unless asked for; the number of restarts depends on the mode."""
    made = loader(Map(), seed=seed)
    assert made.worker_timeout is None
    assert made.max_worker_restarts is None
    assert made.on_error == "raise"
    assert made.bad_samples == "short"
    assert made.max_bad_samples == 1000
    assert made.worker_memory_limit is None


@pytest.mark.parametrize(
    ("given", "seeded", "number"), [(None, True, 3), (None, False, 0), (0, True, 0), (5, False, 5)]
)
def test_restarts(given: int | None, seeded: bool, number: int) -> None:
    """As often as asked for; else three times where a recovered run is exact, and never where it is not."""
    assert max_restarts(given, seeded=seeded) == number


# ------------------------------------------------------------------------------------------------- refill


@pytest.mark.parametrize("loader", LOADERS)
def test_refill_with_all_that_it_needs(loader: Any) -> None:
    """Samples are skipped, the order is seeded, and the dataset is a map with a length."""
    assert loader(Map(), seed=1, on_error="skip", bad_samples="refill").bad_samples == "refill"


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("on_error", ["raise", substitute])
def test_refill_without_skip_is_refused(loader: Any, on_error: Any) -> None:
    """Where samples are not left out there is nothing to be refilled."""
    with pytest.raises(ValueError, match=r"bad_samples='refill' needs on_error='skip', but got on_error=") as caught:
        loader(Map(), seed=1, on_error=on_error, bad_samples="refill")
    assert repr(on_error) in str(caught.value)


@pytest.mark.parametrize("loader", LOADERS)
def test_refill_without_a_seed_is_refused(loader: Any) -> None:
    """The substitutes are a function of the seed."""
    with pytest.raises(ValueError, match="bad_samples='refill' needs seed="):
        loader(Map(), on_error="skip", bad_samples="refill")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dataset", [Endless(), Stream(), SizedStream()], ids=["endless", "stream", "sized stream"])
def test_refill_without_a_length_to_draw_from_is_refused(loader: Any, dataset: Any) -> None:
    """Substitutes are other samples of a map dataset, which must say how many there are."""
    options: dict[str, Any] = {"sampler": range(4)} if isinstance(dataset, Endless) else {}
    with pytest.raises(ValueError, match="bad_samples='refill' needs a map dataset with a length"):
        loader(dataset, seed=1, on_error="skip", bad_samples="refill", **options)
