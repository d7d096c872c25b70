"""Datasets of `unittest.mock`, which have every attribute looked up, work as with torch, which looks up few."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH, collect, run_async


def magic() -> Any:
    dataset = MagicMock()
    dataset.__len__.return_value = 6
    dataset.__getitem__.side_effect = lambda index: torch.tensor([index * 10])
    return dataset


def plain() -> Any:
    dataset: Any = Mock()
    dataset.__len__ = Mock(return_value=6)
    dataset.__getitem__ = Mock(side_effect=lambda index: torch.tensor([index * 10]))
    return dataset


def specified() -> Any:
    dataset = MagicMock(spec=Numbers(6))
    dataset.__len__.return_value = 6
    dataset.__getitem__.side_effect = lambda index: torch.tensor([index * 10])
    return dataset


@pytest.mark.parametrize("make", [magic, plain, specified])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", [{}, {"batch_size": 4, "shuffle": True}, {"batch_size": None}])
def test_a_mock_is_a_dataset(make: Any, workers: int, kind: str, options: dict[str, Any]) -> None:
    """A mock is neither awaited, nor stateful, nor a stream; a mock of a class has the attributes of that class."""
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None, **options}
    got = collect(kind, make(), **options)
    expected = collect("torch", make(), **options)
    assert [batch.tolist() for batch in got] == [batch.tolist() for batch in expected]


def test_methods_that_a_mock_makes_up_do_not_count() -> None:
    """A mock with `__aenter__` would otherwise be asynchronous; one that was given the method is."""
    assert not is_async_dataset(magic())
    dataset = magic()
    dataset.__aenter__ = Mock()
    assert is_async_dataset(dataset)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_seeded_epochs_and_states_of_a_mock(workers: int, kind: str) -> None:
    """The options that torch lacks work; `state_dict` and `set_epoch` of the mock are not called."""
    options: dict[str, Any] = {"seed": 1, "shuffle": True, "num_workers": workers}
    options["multiprocessing_context"] = "fork" if workers else None  # a mock cannot be pickled

    async def load(dataset: Any) -> list[int]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            loader.set_epoch(2)
            state: Any = loader.state_dict()
            loader.load_state_dict(state)
            return [int(batch) async for batch in loader]

    def load_sync(dataset: Any) -> list[int]:
        with DataLoader[Any](dataset, **options) as loader:
            loader.set_epoch(2)
            loader.load_state_dict(loader.state_dict())
            return [int(batch) for batch in loader]

    dataset = magic()
    got = load_sync(dataset) if kind == "sync" else run_async(load(dataset))
    assert sorted(got) == [0, 10, 20, 30, 40, 50]
    assert not dataset.state_dict.called
    assert not dataset.set_epoch.called


def test_what_a_mock_was_given_is_used() -> None:
    """A `set_epoch` that the user set on the mock is called."""
    dataset = magic()
    dataset.set_epoch = Mock()
    loader = DataLoader[Any](dataset)
    loader.set_epoch(2)
    dataset.set_epoch.assert_called_once_with(2)


def test_a_mock_that_awaits() -> None:
    """A mock is asynchronous if its methods are."""
    dataset = MagicMock()
    dataset.__aiter__.return_value = [torch.tensor(1), torch.tensor(2)]
    del dataset.__getitem__

    async def load() -> list[int]:
        async with AsyncDataLoader[Any](dataset) as loader:
            return [int(batch) async for batch in loader]

    assert run_async(load()) == [1, 2]
