"""A sampler that cannot begin, or go on. Its error is raised once, behind the batches that were asked for before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.transports import ReadFailed
from tests.helpers.running import run_async
from tests.helpers.seeded_runs import Stepwise

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


class Pairs:
    """A batch sampler that raises once, instead of its sixth batch, and can go on."""

    def __init__(self, error: type[Exception]) -> None:
        self.error: type[Exception] | None = error

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        return GoesOn(self)


class GoesOn(Iterator[list[int]]):
    def __init__(self, sampler: Pairs) -> None:
        self.sampler, self.number = sampler, 0

    def __next__(self) -> list[int]:
        if self.number == 12:
            raise StopIteration
        error = self.sampler.error
        if self.number == 5 and error is not None:
            self.sampler.error = None
            raise error("no index")
        self.number += 1
        return PAIRS[self.number - 1]


class Generated(Pairs):
    """Cannot go on: a generator ends with an error."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()


PAIRS = [[2 * number, 2 * number + 1] for number in range(12)]


@pytest.mark.parametrize("loop", ["sync", "asyncio"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Pairs, Generated])
@pytest.mark.parametrize("error", [ValueError, ReadFailed])
def test_its_error_costs_no_batch(
    error: type[Exception], kind: type[Pairs], workers: int, seed: int | None, loop: str
) -> None:
    """With workers the epoch ends there, and each further call raises a store's error again; without, a sampler that
    can go on, or whose store failed, goes on at the next call. The state does not say that the epoch was finished: a
    run that resumes reads the rest.
    """

    def run_of(sampler: Pairs) -> Stepwise:
        return Stepwise(loop, range(24), batch_sampler=sampler, num_workers=workers, seed=seed)

    with run_of(kind(error)) as run:
        run.begin()
        assert [run.step().tolist() for _ in range(5)] == PAIRS[:5]
        with pytest.raises(error, match="no index"):
            run.step()
        states = [run.loader.state_dict()]
        if workers and error is ReadFailed:
            with pytest.raises(error, match="no index"):
                run.step()
        elif workers or (kind is Generated and error is ValueError):
            assert run.rest() == []
            states.append(run.loader.state_dict())
        else:
            assert [batch.tolist() for batch in run.rest()] == PAIRS[5:]
            assert run.loader.state_dict()["finished"]
    for state in states:
        assert (state["step"], state["finished"]) == (5, False)
        with run_of(kind(error)) as run:
            run.loader.batch_sampler.error = None
            run.loader.load_state_dict(state)
            assert [batch.tolist() for batch in run.epoch()] == PAIRS[5:]


async def test_another_task_that_waits_gets_its_error() -> None:
    """The task that got the last batch does not come again; of the others that wait, one gets the error."""
    async with AsyncDataLoader[Any](range(24), batch_sampler=Pairs(ValueError), num_workers=1) as loader:  # type: ignore[arg-type]
        batches = aiter(loader)
        got = [(await anext(batches)).tolist() for _ in range(4)]
        tasks = [asyncio.ensure_future(anext(batches)) for _ in range(3)]
        last, failed, end = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(failed, ValueError)
        assert isinstance(end, StopAsyncIteration)
        assert [*got, last.tolist()] == PAIRS[:5]  # type: ignore[union-attr]
