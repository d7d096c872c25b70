from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncloader import AsyncDataLoader, DataLoader, Recovery, Subset
from tests.helpers.datasets import Numbers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "faults: a worker's death ends the epoch; a sample that raises fails its batch"),
        ({"seed": 1}, "a worker that dies is replaced, 3 times an epoch at most; "),
        (
            {"max_worker_restarts": 5, "recovery": Recovery(worker_timeout=2.5)},
            "replaced, 5 times an epoch at most, one that is at a task",
        ),
        ({"recovery": Recovery(worker_timeout=2.5)}, "for 2.5 s is killed"),
        ({"on_error": "skip"}, "a sample that raises is left out"),
        ({"on_error": "refill", "seed": 1}, "a sample that raises is replaced by another one"),
        ({"on_error": lambda index, error: 0}, "a sample that raises is replaced by on_error"),
    ],
)
def test_faults_are_explained(options: dict[str, Any], words: str) -> None:
    """The text says what happens after a worker's death and after a sample's error."""
    assert words in DataLoader[Any](Numbers(4), num_workers=1, **options).explain()


class Silent(Numbers):
    """A dataset that `repr` must not ask for its length or its own `repr`."""

    def __len__(self) -> int:
        raise AssertionError

    __repr__ = __len__  # type: ignore[assignment]


def test_the_repr_shows_dataset_order_and_place() -> None:
    """The repr is right before, within and after an epoch and when closed; it asks the dataset for nothing."""
    loader = DataLoader[Any](Numbers(6), batch_size=3, seed=5)
    head = "<DataLoader of Numbers: batch_size=3, sampler=SeededSampler, num_workers=0, seed=5; "
    assert repr(loader) == f"{head}not iterated yet>"
    batches = iter(loader)
    next(batches)
    assert repr(loader) == f"{head}epoch 0, 1 of 2 batches delivered>"
    list(batches)
    assert repr(loader) == f"{head}epoch 0, finished>"
    loader.close()
    assert repr(loader) == f"{head}closed>"
    silent = AsyncDataLoader[Any](Silent(3), batch_sampler=[[0, 1]])
    assert repr(silent).startswith("<AsyncDataLoader of Silent: batch_size=None, batch_sampler=list, num_workers=0")


@pytest.mark.parametrize("loader", [DataLoader, AsyncDataLoader])
def test_methods_that_are_gone(loader: type[Any]) -> None:
    """Their errors say what to do instead."""
    for call, instead in (
        (loader(Numbers(3)).progress, r"tqdm\(loader\)"),
        (loader(Numbers(3)).where, "collate_fn=list"),
    ):
        with pytest.raises(AttributeError, match=f"is gone: .*{instead}"):
            call()


@pytest.mark.parametrize("loader", [DataLoader, AsyncDataLoader])
def test_a_loader_that_is_not_constructed_has_a_repr(loader: type[Any]) -> None:
    """A debugger shows it while the constructor runs."""
    assert f"{loader.__name__} object at" in repr(object.__new__(loader))


def test_the_table_for_notebooks_is_escaped() -> None:
    """The table has the words of the repr."""

    class Odd(Numbers):
        pass

    Odd.__name__ = "<b>"
    table = AsyncDataLoader[Any](Odd(3), batch_size=2)._repr_html_()
    assert "<td>&lt;b&gt;</td>" in table
    assert "<tr><th>batch_size</th><td>2</td></tr>" in table


class Listed(Numbers):
    """A dataset with a structure in Python's own memory."""

    def __init__(self, names: Any) -> None:
        super().__init__(4)
        self.names = names


@pytest.mark.parametrize(
    ("names", "method", "words"),
    [
        (["a"] * 100_000, "fork", "dataset.dataset.names has 100,000 Python objects, which each worker comes to copy"),
        (
            dict.fromkeys(range(100_000)),
            "spawn",
            "dataset.dataset.names has 100,000 Python objects, which each worker has",
        ),
        (["a"] * 99_999, "fork", None),
        (np.zeros(100_000), "fork", None),
    ],
)
def test_structures_that_each_worker_copies_are_named(names: Any, method: str, words: str | None) -> None:
    """Large structures of Python objects, also under a view of the dataset; no arrays, and none without processes."""
    dataset = Subset(Listed(names), [0, 1])
    loader = DataLoader[Any](dataset, num_workers=1, multiprocessing_context=method)
    assert (words or "") in loader.explain()
    assert ("sharing: " in loader.explain()) == (words is not None)
    assert "sharing: " not in DataLoader[Any](dataset).explain()
    assert "sharing: " not in DataLoader[Any](dataset, num_workers=1, workers="threads").explain()
