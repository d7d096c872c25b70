"""Options without an effect: one warning that names both options, at the line that makes the loader."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, Recovery, RemoteIterableDataset
from asyncloader.errors import NoEffectWarning
from asyncloader.options.objects import grouped
from tests.helpers.datasets import AsyncNumbers, AsyncStream, Numbers

BLOCKING, AWAITED = Numbers(6), AsyncNumbers(6)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def doubled(sample: Any) -> Any:
    return 2 * sample


async def awaited(samples: Any) -> Any:
    return samples


SHARDS = RemoteIterableDataset("none.tar")

ONE_AFTER_THE_OTHER = "an iterable dataset, whose samples are read one after the other"
WITHOUT_EFFECT: list[tuple[Any, dict[str, Any], str]] = [
    (BLOCKING, {"worker_timeout": 5}, "worker_timeout=5 does nothing with num_workers=0"),
    (
        BLOCKING,
        {"worker_timeout": 5, "worker_memory_limit": 9, "max_worker_restarts": 1},
        "worker_timeout=5 and worker_memory_limit=9 and max_worker_restarts=1 do nothing with num_workers=0",
    ),
    (
        BLOCKING,
        {"worker_timeout": 5, "num_workers": 1},
        "worker_timeout=5 does not replace workers with max_worker_restarts=0 (the default without seed=): one that",
    ),
    (
        Stream(),
        {"worker_timeout": 5, "num_workers": 1, "seed": 1, "max_worker_restarts": 0},
        "worker_timeout=5 does not replace workers with max_worker_restarts=0: one that",
    ),
    (Stream(), {"concurrency": 64}, "concurrency=64 does nothing for an iterable dataset"),
    (AsyncStream([3]), {"concurrency": 64}, "concurrency=64 does nothing for an iterable dataset"),
    (
        SHARDS,
        {"concurrency": 64},
        f"concurrency=64 does nothing for {ONE_AFTER_THE_OTHER}. Raise num_workers, or its read_ahead=",
    ),
    (AWAITED, {"decode_threads": 2}, "decode_threads=2 does nothing without decode=, or"),
    (
        BLOCKING,
        {"decode": doubled, "decode_threads": 2},
        "decode_threads=2 does nothing without decode=, or where samples are not concurrent",
    ),
    (BLOCKING, {"max_skipped_samples": 10}, "max_skipped_samples=10 does nothing with on_error='raise'"),
    (BLOCKING, {"max_skipped_samples": None}, "max_skipped_samples=None does nothing with on_error='raise'"),
    (BLOCKING, {"on_uneven": "error"}, "on_uneven='error' does nothing without seed="),
    (BLOCKING, {"reorder_window": 32}, "reorder_window=32 does nothing without seed="),
    (Stream(), {"reorder_window": 32, "seed": 1}, "reorder_window=32 does nothing for an iterable dataset"),
    (BLOCKING, {"device_prefetch": 2}, "device_prefetch=2 does nothing without device="),
    (AWAITED, {"collate_fn": awaited}, "async does nothing for collate_fn, which is called, and not awaited"),
]
WITH_EFFECT: list[tuple[Any, dict[str, Any]]] = [
    (BLOCKING, {"ring_bytes": 1 << 20, "max_worker_restarts": 0, "num_workers": 0}),
    (BLOCKING, {"worker_timeout": 5, "worker_memory_limit": 9, "max_worker_restarts": 1, "num_workers": 1}),
    (BLOCKING, {"worker_timeout": 5, "seed": 1, "num_workers": 1}),
    (BLOCKING, {"worker_memory_limit": 9, "max_worker_restarts": 0, "num_workers": 1}),
    (BLOCKING, {"concurrency": 64}),
    (AWAITED, {"collate_fn": doubled}),
    (BLOCKING, {"concurrency": 1, "decode_threads": 0, "max_skipped_samples": 0, "reorder_window": 0}),
    (AWAITED, {"concurrency": 64, "decode": doubled, "decode_threads": 2}),
    (BLOCKING, {"concurrency": 2, "decode": doubled, "decode_threads": 2}),
    (SHARDS, {"decode_threads": 2, "decode": abs, "concurrency": 1}),
    (SHARDS, {"on_uneven": "error"}),
    (BLOCKING, {"on_error": "skip", "max_skipped_samples": 10}),
    (BLOCKING, {"seed": 1, "reorder_window": 32, "on_uneven": "pad", "device": "cpu", "device_prefetch": 2}),
]


def warnings_of(make: Any, *args: Any, **options: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        make(*args, **grouped(options))
    return caught


@pytest.mark.parametrize("loader", [DataLoader, AsyncDataLoader])
@pytest.mark.parametrize(("dataset", "options", "words"), WITHOUT_EFFECT, ids=[each[2] for each in WITHOUT_EFFECT])
def test_what_is_warned_of(loader: Any, dataset: Any, options: dict[str, Any], words: str) -> None:
    """The warning is given once, with the options' names and values, at the line that makes the loader."""
    caught = warnings_of(loader, dataset, **options)
    assert [str(warning.message)[: len(words)] for warning in caught] == [words]
    made_at = inspect.getsourcelines(warnings_of)[1] + 3
    assert (caught[0].filename, caught[0].lineno, caught[0].category) == (__file__, made_at, NoEffectWarning)


@pytest.mark.parametrize(("dataset", "options"), WITH_EFFECT, ids=[str(list(each[1])) for each in WITH_EFFECT])
def test_what_is_not_warned_of(dataset: Any, options: dict[str, Any]) -> None:
    """Options that act are not warned of, nor is a bound that holds anyway, or a switch that is off."""
    assert not warnings_of(DataLoader, dataset, **options)


def test_what_is_taken_over_is_not_warned_of() -> None:
    """A clone, or a loader made from another, warns only of options that it changes, at the line that changes them."""
    loader = DataLoader(Stream(), num_workers=1, recovery=Recovery(worker_timeout=5), concurrency=64)
    assert not warnings_of(loader.clone, num_workers=0)
    assert not warnings_of(AsyncDataLoader.from_torch, loader)
    (warning,) = warnings_of(loader.clone, concurrency=9)
    assert str(warning.message).startswith("concurrency=9 ")
    (warning,) = warnings_of(loader.clone, num_workers=0, worker_timeout=7)
    assert str(warning.message).startswith("worker_timeout=7 ")
    assert warning.filename == __file__
