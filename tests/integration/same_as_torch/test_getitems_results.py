"""The result of `__getitems__` need not be a list: it is passed to the collation unchanged, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH, outcomes, without_place

Results = Callable[[list[int]], Any]


class Indexed:
    """A sequence without `__iter__` and without a base class."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]


RESULTS: dict[str, Results] = {
    "array": lambda indices: np.array(indices, np.float32),
    "rows": lambda indices: np.array([[index, index] for index in indices]),
    "tuple": tuple,
    "generator": lambda indices: (index for index in indices),
    "map": lambda indices: map(float, indices),
    "range": lambda indices: range(indices[0], indices[-1] + 1),
    "indexed": Indexed,
    "dict": lambda indices: {"indices": indices},
    "none": lambda _: None,
}


class Batches(Dataset[Any]):
    """Makes its result from the indices by an entry of `RESULTS`, given by name, or by a function that pickles."""

    def __init__(self, results: str | Results) -> None:
        self.results = results

    def made(self, indices: Any) -> Any:
        return (RESULTS[self.results] if isinstance(self.results, str) else self.results)(indices)

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> Any:
        return self.made(indices)


class AsyncBatches(Batches):
    async def __getitems__(self, indices: list[int]) -> Any:
        return self.made(indices)


class AwaitedLater(AsyncBatches):
    """Its `__getitems__` gives coroutines."""

    async def __getitem__(self, index: int) -> int:
        return index

    async def __getitems__(self, indices: list[int]) -> Any:
        return self.made([self.__getitem__(index) for index in indices])


def listed(batch: Any) -> Any:
    """A collation that handles every result."""
    if isinstance(batch, Indexed):
        return [batch[item] for item in range(len(batch))]
    return batch if batch is None else [*batch]


def comparable(found: list[Any]) -> list[Any]:
    return [
        (each[0], without_place(each[1]).splitlines()[-1]) if isinstance(each, tuple) and len(each) == 2 else each
        for each in found
    ]


@pytest.mark.parametrize("name", [*RESULTS])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"concurrency": 2}, {"seeded": 1}], ids=str)
def test_results_are_collated_as_torch_collates_them(options: dict[str, Any], name: str) -> None:
    """torch's default collation gives the same batches or errors, and a user's collation gets the same object."""
    collations: list[dict[str, Any]] = [{}, {"collate_fn": listed}]
    for collation in collations:
        expected = outcomes("torch", Batches(name), batch_size=2, num_workers=0, **collation)
        got = outcomes("sync", Batches(name), batch_size=2, **options, **collation)
        if isinstance(expected[0], tuple) and expected[0][0] in (TypeError, KeyError):
            assert [each[0] for each in got] == [each[0] for each in expected]
        else:
            assert_same(got, expected)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_results_of_async_getitems(workers: int, kind: str) -> None:
    """They are passed on as torch would; samples that nobody has awaited are refused."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "collate_fn": listed}
    for name in ("array", "tuple", "generator", "map", "indexed", "none"):
        batches = outcomes(kind, AsyncBatches(name), **options)
        assert batches == ([None, None] if name == "none" else [[0, 1], [2, 3]])
    for results in (list, tuple):
        ((error, text), *_) = outcomes(kind, AwaitedLater(results), **options)
        assert error is TypeError
        assert "samples that are still to be awaited" in text


def decode(sample: int) -> int:
    return sample + 10


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_an_iterator_are_counted_and_decoded(workers: int) -> None:
    """The statistics count them, and `decode` is applied to them."""
    each: list[dict[str, Any]] = [{}, {"concurrency": 2}]
    for options in each:
        dataset = Batches("generator")
        with DataLoader[Any](dataset, batch_size=2, num_workers=workers, decode=decode, **options) as loader:
            assert [batch.tolist() for batch in loader] == [[10, 11], [12, 13]]
        with DataLoader[Any](dataset, batch_size=2, num_workers=workers, collate_fn=listed, **options) as loader:
            assert [*loader] == [[0, 1], [2, 3]]
            assert loader.stats()["data/samples"] == 4
