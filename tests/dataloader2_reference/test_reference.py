"""The same graphs through torchdata 0.9.0's DataLoader2 and ours: items, order, seeds, limits, errors, ends.

Run by ``make test-dataloader2-reference``, in an environment of its own: no later torchdata has a DataLoader2. The
functional forms are torchdata's here wherever it has them, so our services are also tested over its datapipes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from asyncloader.dataloader2.graph import list_dps, traverse_dps
from tests.dataloader2.parts import GRAPHS, MP, UNEVEN, Seeded, fails_at_5, numbers, plain

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs: Any = pytest.importorskip("torchdata.dataloader2", reason="only torchdata up to 0.9 has a DataLoader2")

import asyncloader.dataloader2 as ours  # noqa: E402 - after torchdata: the names are then torchdata's

BOTH: list[Any] = [theirs, ours]
ALL = GRAPHS | UNEVEN


def service(module: Any, workers: int) -> Any:
    return module.MultiProcessingReadingService(workers) if workers else module.InProcessReadingService()


def epochs(module: Any, graph: Any, workers: int, count: int = 2, seed: int = 3) -> list[list[Any]]:
    loader = module.DataLoader2(graph, reading_service=service(module, workers))
    loader.seed(seed)
    try:
        return [[plain(item) for item in loader] for _ in range(count)]
    finally:
        loader.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ALL)
def test_same_items_in_the_same_order(name: str, workers: int) -> None:
    """Two epochs of each graph have the same items; the order is not compared for shuffles: random numbers differ."""
    expected, found = (epochs(module, ALL[name](), workers) for module in BOTH)
    if any(hasattr(each, "set_shuffle") for each in list_dps(traverse_dps(ALL[name]()))):
        expected, found = ([sorted(map(repr, epoch)) for epoch in each] for each in (expected, found))
        if "diamond" in name or "batches" in name:
            expected, found = ([[len(epoch)] for epoch in each] for each in (expected, found))
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("module", BOTH)
def test_same_meaning_of_seeds(module: Any, workers: int) -> None:
    """In each library the same seed gives the same epoch; seeds are shared before a filter, and own after it."""
    graph = numbers(20).shuffle().sharding_filter()
    assert (
        epochs(module, graph, workers, 1) == epochs(module, graph, workers, 1) != epochs(module, graph, workers, 1, 4)
    )
    (items,) = epochs(module, Seeded(Seeded(numbers(4)).sharding_filter()), workers, 1)
    text = [repr(item) for item in items]
    assert len({shared for (_, [(_, [_, shared]), _]) in items}) == 1, text
    assert len({own for (_, [_, own]) in items}) == max(1, workers), text


@pytest.mark.parametrize("workers", [0, 2])
def test_same_limits(workers: int) -> None:
    """Both pause at a limit after the same items, and give the same items after `resume`."""

    def run(module: Any) -> Any:
        loader = module.DataLoader2(numbers(8).sharding_filter(), reading_service=service(module, workers))
        iterator = iter(loader)
        iterator.limit(3)
        found = [list(iterator), list(iterator)]
        iterator.resume()
        found.append(list(iterator))
        iterator.limit(None)
        iterator.resume()
        found.append(list(iterator))
        loader.shutdown()
        return found

    assert run(ours) == run(theirs) == [[0, 1, 2], [], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("workers", [0, 2])
def test_same_errors(workers: int) -> None:
    """The items before the error are the same, its type, the first line of its text, and the next attempt."""

    def run(module: Any) -> Any:
        found: list[Any] = []
        graph = numbers(10).sharding_filter().map(fails_at_5)
        loader = module.DataLoader2(graph, reading_service=service(module, workers))
        for _ in range(2):
            try:
                for item in loader:
                    found.append(item)  # noqa: PERF402 - up to the error
            except Exception as error:
                found.append((type(error), str(error).splitlines()[0]))
        return found

    assert run(ours) == run(theirs)


def test_same_words() -> None:
    """Both refuse the same calls with the same errors."""

    def run(module: Any) -> Any:
        loader = module.DataLoader2(numbers(3))
        older = iter(loader)
        next(iter(loader))
        calls: list[Any] = [
            lambda: iter(module.DataLoader2(None)),
            lambda: next(older),
            lambda: loader.seed(1 << 64),
            lambda: loader.load_state_dict(loader.state_dict()),
            lambda: (loader.shutdown(), iter(loader)),
        ]
        found = []
        for call in calls:
            with pytest.raises(Exception) as caught:
                call()
            found.append((type(caught.value), str(caught.value)))
        return found

    assert run(ours) == run(theirs)


def test_theirs_and_ours_are_recognized() -> None:
    """A graph of torchdata's own parts is shared out like a graph of ours."""
    graph = numbers(9).sharding_round_robin_dispatch(MP).prefetch(2)
    assert type(graph).__module__.startswith("torchdata.")
    assert epochs(ours, graph, 2) == [list(range(9))] * 2
