"""With warnings as errors no batch is lost to a warning of ours."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.errors import warn_aside
from tests.helpers.running import BOTH, run_async


class Texts(Dataset[Any]):
    """Two megabytes of Python objects per sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index, "x" * (2 << 20)


class Drawing(Dataset[Any]):
    """Draws from a global generator where samples are made concurrently."""

    def __len__(self) -> int:
        return 4

    async def __getitem__(self, index: int) -> Any:
        random.random()
        return index, ""


def first(samples: list[Any]) -> Any:
    return samples[0]


def numbers_and_warnings(kind: str, dataset: Any, **options: Any) -> tuple[list[int], list[str]]:
    numbers: list[int] = []
    warned: list[str] = []

    def sync() -> None:
        with DataLoader[Any](dataset, collate_fn=first, **options) as loader:
            batches = iter(loader)
            while True:
                try:
                    numbers.append(next(batches)[0])
                except StopIteration:
                    return
                except Warning as warning:
                    warned.append(str(warning))

    async def run() -> None:
        async with AsyncDataLoader[Any](dataset, collate_fn=first, **options) as loader:
            batches = aiter(loader)
            while True:
                try:
                    numbers.append((await anext(batches))[0])
                except StopAsyncIteration:
                    return
                except Warning as warning:
                    warned.append(str(warning))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "sync":
            sync()
        else:
            run_async(run())
    return numbers, warned


@pytest.mark.parametrize("kind", BOTH)
def test_a_large_pickle(kind: str) -> None:
    """The warning is raised once, between two batches."""
    numbers, warned = numbers_and_warnings(kind, Texts(), num_workers=1)
    assert numbers == [0, 1, 2, 3]
    (text,) = warned
    assert "bytes of Python objects" in text


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_draw_from_the_global_generators(workers: int, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning arises in the worker, where only a batch could be raised instead: it is logged once, not raised.
    Without workers there is none.
    """
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    numbers, warned = numbers_and_warnings(kind, Drawing(), seed=1, **options)
    assert (numbers, warned) == ([0, 1, 2, 3], [])
    assert caplog.text.count("drew from the process-global generators") == workers


def test_a_warning_aside(caplog: pytest.LogCaptureFixture) -> None:
    """`warn_aside` warns; where warnings are errors it logs the text, and returns the warning to be raised later."""
    with pytest.warns(RuntimeWarning, match="a test"):
        assert warn_aside("a test", RuntimeWarning) is None
    assert not caplog.records
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "asyncloader"):
        warnings.simplefilter("error")
        raised = warn_aside("a test", RuntimeWarning)
    assert type(raised) is RuntimeWarning
    assert [record.getMessage() for record in caplog.records] == ["a test"]
