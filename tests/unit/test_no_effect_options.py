"""Options that can do nothing: one warning that names both options, at the line that makes the loader."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, RemoteIterableDataset
from asyncloader.errors import NoEffectWarning
from tests.integration.datasets import AsyncNumbers, AsyncStream, Numbers

BLOCKING, AWAITED = Numbers(6), AsyncNumbers(6)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def doubled(sample: Any) -> Any:
    return 2 * sample


SHARDS = RemoteIterableDataset("none.tar")
DECODED = RemoteIterableDataset("none.tar", decode=doubled)

WITHOUT_EFFECT: list[tuple[Any, dict[str, Any], str]] = [
    (BLOCKING, {"worker_timeout": 5}, "worker_timeout=5 does nothing with num_workers=0"),
    (
        BLOCKING,
        {"worker_timeout": 5, "worker_memory_limit": 9, "max_worker_restarts": 1},
        "worker_timeout=5 and worker_memory_limit=9 and max_worker_restarts=1 do nothing with num_workers=0",
    ),
    (BLOCKING, {"concurrency": 64}, "concurrency=64 does nothing for a dataset without async methods"),
    (BLOCKING, {"concurrency": 64, "fetch_threads": 4}, "concurrency=64 does nothing beside fetch_threads=4"),
    (Stream(), {"concurrency": 64}, "concurrency=64 does nothing for an iterable dataset"),
    (AsyncStream([3]), {"concurrency": 64}, "concurrency=64 does nothing for an iterable dataset"),
    (AWAITED, {"decode_threads": 2}, "decode_threads=2 does nothing without decode="),
    (
        BLOCKING,
        {"decode": doubled, "decode_threads": 2},
        "decode_threads=2 does nothing for a blocking dataset with fetch_threads=0",
    ),
    (DECODED, {"decode": doubled}, "decode=<function doubled"),
    (BLOCKING, {"max_bad_samples": 10}, "max_bad_samples=10 does nothing with on_error='raise'"),
    (BLOCKING, {"max_bad_samples": None}, "max_bad_samples=None does nothing with on_error='raise'"),
    (BLOCKING, {"on_uneven": "error"}, "on_uneven='error' does nothing without seed="),
    (BLOCKING, {"run_ahead": 32}, "run_ahead=32 does nothing without seed="),
    (Stream(), {"run_ahead": 32, "seed": 1}, "run_ahead=32 does nothing for an iterable dataset"),
    (BLOCKING, {"prefetch_device": 2}, "prefetch_device=2 does nothing without device="),
]
WITH_EFFECT: list[tuple[Any, dict[str, Any]]] = [
    (BLOCKING, {"ring_bytes": 1 << 20, "max_worker_restarts": 0, "num_workers": 0}),
    (BLOCKING, {"worker_timeout": 5, "worker_memory_limit": 9, "max_worker_restarts": 0, "num_workers": 1}),
    (BLOCKING, {"concurrency": 1, "decode_threads": 0, "max_bad_samples": 0, "run_ahead": 0}),
    (AWAITED, {"concurrency": 64, "decode": doubled, "decode_threads": 2}),
    (BLOCKING, {"fetch_threads": 2, "decode": doubled, "decode_threads": 2}),
    (DECODED, {"decode_threads": 2, "decode": abs}),
    (SHARDS, {"on_uneven": "error"}),
    (BLOCKING, {"on_error": "skip", "max_bad_samples": 10}),
    (BLOCKING, {"seed": 1, "run_ahead": 32, "on_uneven": "pad", "device": "cpu", "prefetch_device": 2}),
]


def warnings_of(make: Any, *args: Any, **options: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        make(*args, **options)
    return caught


@pytest.mark.parametrize("loader", [DataLoader, AsyncDataLoader])
@pytest.mark.parametrize(("dataset", "options", "words"), WITHOUT_EFFECT, ids=[each[2] for each in WITHOUT_EFFECT])
def test_what_is_warned_of(loader: Any, dataset: Any, options: dict[str, Any], words: str) -> None:
    """Once, with the options' names and values, and at the line that makes the loader."""
    caught = warnings_of(loader, dataset, **options)
    assert [str(warning.message)[: len(words)] for warning in caught] == [words]
    made_at = inspect.getsourcelines(warnings_of)[1] + 3
    assert (caught[0].filename, caught[0].lineno, caught[0].category) == (__file__, made_at, NoEffectWarning)


@pytest.mark.parametrize(("dataset", "options"), WITH_EFFECT, ids=[str(list(each[1])) for each in WITH_EFFECT])
def test_what_is_not_warned_of(dataset: Any, options: dict[str, Any]) -> None:
    """Options that act, and those whose wish is met all the same: a bound that holds, or something switched off."""
    assert not warnings_of(DataLoader, dataset, **options)


def test_what_is_taken_over_is_not_warned_of() -> None:
    """A clone, or a loader made from another one, warns of what it changes, at the line that asks for it."""
    loader = DataLoader(BLOCKING, num_workers=1, worker_timeout=5, concurrency=64)
    assert not warnings_of(loader.clone, num_workers=0)
    assert not warnings_of(AsyncDataLoader.from_torch, loader)
    (warning,) = warnings_of(loader.clone, concurrency=9)
    assert str(warning.message).startswith("concurrency=9 ")
    assert warning.filename == __file__
