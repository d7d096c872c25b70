"""A sampler that cannot begin, or go on. Without a seed its error is raised once, as in torch, and ends the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.running import run_async

Found = list[str]


class Unborn:
    """Each `__iter__` raises; `calls` counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        self.calls += 1
        raise PermissionError("no order")


def steps(make: Any, options: dict[str, Any]) -> Found:
    """The outcomes of ``iter(loader)`` and of four calls of ``next``."""
    found: Found = []
    try:
        batches = iter(make(range(8), **options))
    except PermissionError as error:
        return [f"{error}, by iter"]
    for _ in range(4):
        try:
            found.append(str(next(batches)))
        except PermissionError as error:
            found.append(str(error))
        except StopIteration:
            found.append("end")
    return found


async def async_steps(options: dict[str, Any]) -> Found:
    found: Found = []
    async with AsyncDataLoader[Any](range(8), **options) as loader:  # type: ignore[arg-type]
        try:
            batches = aiter(loader)
        except PermissionError as error:
            return [f"{error}, by iter"]
        for _ in range(4):
            try:
                found.append(str(await anext(batches)))
            except PermissionError as error:
                found.append(str(error))
            except StopAsyncIteration:
                found.append("end")
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's iterator
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", [{"sampler": 1}, {"sampler": 1, "batch_size": None}, {"batch_sampler": 1}], ids=str)
def test_its_error_comes_once(how: dict[str, Any], workers: int) -> None:
    """``iter`` or the first ``next`` raises it, like torch's; the sampler is not asked again."""
    options = {name: Unborn() if value == 1 else value for name, value in how.items()} | {"num_workers": workers}
    expected = steps(torch.utils.data.DataLoader, options)
    for sampler in (options.get("sampler"), options.get("batch_sampler")):
        if isinstance(sampler, Unborn):
            sampler.calls = 0
            assert steps(DataLoader, options) == expected
            assert sampler.calls == 1
            assert run_async(async_steps(options)) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_its_error_comes_each_time_with_a_seed(workers: int) -> None:
    """With a seed an order that could not begin is begun by the next call."""
    options: dict[str, Any] = {"sampler": Unborn(), "seed": 1, "num_workers": workers}
    for found in (steps(DataLoader, options), run_async(async_steps(options))):
        assert found in (["no order, by iter"], ["no order"] * 4)


class Failing:
    """Raises instead of index 4. Its iterator is no generator: it would go on behind that."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return map(self._index, range(8))

    def _index(self, index: int) -> int:
        if index == 4:
            raise PermissionError("no index")
        return index


@pytest.mark.parametrize("seed", [None, 1])
def test_the_epoch_ends_with_its_error(seed: int | None) -> None:
    """The indices that were taken for the batch make no shorter batch. Nor do they in a resumed epoch."""
    options: dict[str, Any] = {"batch_size": 3, "sampler": Failing()}
    expected = steps(torch.utils.data.DataLoader, options)
    assert expected == ["tensor([0, 1, 2])", "no index", "end", "end"]
    assert steps(DataLoader, options | {"seed": seed}) == expected
    loader = DataLoader[Any](range(8), seed=seed, **options)  # type: ignore[arg-type]
    next(iter(loader))
    state = loader.state_dict()

    def resumed(dataset: Any, **options: Any) -> Any:
        loader = DataLoader[Any](dataset, seed=seed, **options)
        loader.load_state_dict(state)
        return loader

    assert steps(resumed, options) == ["no index", "end", "end", "end"]
