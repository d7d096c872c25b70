"""torch's datapipes as datasets: settings, sharding by worker, a seed shared by the workers; all as in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same, same
from tests.helpers.datasets import identity
from tests.helpers.running import BOTH, Run, run_loader
from tests.helpers.side_by_side import MAKERS, messages, outcome, steps
from tests.pairwise import quickly

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def double(x: int) -> int:
    return 2 * x


def is_even(x: int) -> bool:
    return x % 2 == 0


def shuffled() -> Any:
    return IterableWrapper(range(24)).shuffle().sharding_filter()


class Seeded(IterDataPipe[Any]):
    """A user's pipe that needs a seed, and gives the seed with each element."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.seed: int | None = None

    def set_seed(self, seed: int) -> Seeded:
        self.seed = seed
        return self

    def __iter__(self) -> Iterator[Any]:
        for x in self.source:
            yield x, self.seed, float(torch.rand(()))


PIPES: dict[str, Callable[[], Any]] = {
    "plain": lambda: IterableWrapper(range(12)),
    "shuffled": lambda: IterableWrapper(range(12)).shuffle(),
    "shuffled and sharded": shuffled,
    "sharded, then mapped": lambda: IterableWrapper(range(24)).sharding_filter().map(double),
    "small buffer": lambda: IterableWrapper(range(24)).shuffle(buffer_size=5).sharding_filter().filter(is_even),
    "batched inside": lambda: IterableWrapper(range(24)).shuffle().sharding_filter().batch(2).collate(),
    "two shuffles": lambda: IterableWrapper(range(12)).shuffle().map(double).shuffle(),
    "zipped": lambda: IterableWrapper(range(12)).shuffle().zip(IterableWrapper(range(12)).shuffle()),
    "with a seed of its own": lambda: Seeded(IterableWrapper(range(12)).shuffle().sharding_filter()),
}


def both(kind: str, pipe: Callable[[], Any], **options: Any) -> tuple[Run, Run]:
    """A run of our loader and a run of torch's, each with a pipe of its own."""
    return run_loader(kind, pipe(), **options), run_loader("torch", pipe(), **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", quickly(PIPES, "two shuffles", "zipped", "shuffled and sharded"))
def test_same_elements_in_the_same_order(name: str) -> None:
    """Two epochs of each pipe, with each number of workers: torch's batches, and torch's generators afterwards."""
    for workers in range(4):
        options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "persistent_workers": workers == 2}
        expected = run_loader("torch", PIPES[name](), epochs=2, **options)
        assert expected.epochs[0]
        for kind in BOTH if workers % 2 == 0 else ["sync"]:
            got = run_loader(kind, PIPES[name](), epochs=2, **options)
            assert_same(got.epochs, expected.epochs, f"{kind}, {workers} workers")
            assert got.after == expected.after


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [None, True, False])
def test_shuffle_goes_to_the_pipes(kind: str, workers: int, shuffle: bool | None) -> None:
    """`shuffle` switches the pipe's own shufflers on or off; None leaves them unchanged."""
    options: dict[str, Any] = {"shuffle": shuffle, "num_workers": workers, "batch_size": 3, "epochs": 2}
    got, expected = both(kind, shuffled, **options)
    assert_same(got.epochs, expected.epochs)
    values = [[int(x) for batch in epoch for x in batch] for epoch in got.epochs]
    assert [sorted(epoch) for epoch in values] == [list(range(24))] * 2
    assert (values[0] != values[1]) == (shuffle is not False)
    off = both(kind, shuffled_off, **options)
    assert_same(off[0].epochs, off[1].epochs)
    assert same(off[0].epochs[0], off[0].epochs[1]) == (shuffle is not True)


def shuffled_off() -> Any:
    return IterableWrapper(range(24)).shuffle().set_shuffle(False).sharding_filter()


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_shuffle_without_a_shuffler_warns(kind: str) -> None:
    """torch's warning is given, in the constructor."""

    def run(name: str) -> Any:
        loaders: list[Any] = []
        return messages(lambda: loaders.append(MAKERS[name](IterableWrapper(range(3)), shuffle=True)))

    expected = run("torch")
    assert run(kind) == expected
    assert "does not contain a `Shuffler`" in expected[0][1]


def test_constructor_rules_for_pipes() -> None:
    """A pipe may be given `shuffle`, but neither a sampler nor a batch sampler; the error has torch's text."""
    for options in ({"sampler": [1]}, {"batch_sampler": [[1]]}, {"shuffle": False, "sampler": [1]}, {"shuffle": True}):
        found = [outcome(make, shuffled(), **options) for make in MAKERS.values()]
        if isinstance(found[0], tuple):
            assert found[1:] == found[:1] * 2
        else:
            assert not any(isinstance(loader, tuple) for loader in found)


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
def test_dataset_is_the_serialization_wrapper(make: Any) -> None:
    """`loader.dataset` is torch's wrapper of the pipe, and has the pipe's length."""
    for pipe in (IterableWrapper(range(5)), SequenceWrapper(range(5))):
        ours: Any = make(pipe)
        theirs: Any = torch.utils.data.DataLoader(pipe)
        assert type(ours.dataset) is type(theirs.dataset)
        assert type(ours.dataset).__name__.endswith("DataPipeSerializationWrapper")
        assert len(ours.dataset) == len(ours) == len(theirs) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (1, False), (3, True)])
def test_map_pipes(kind: str, workers: int, shuffle: bool) -> None:
    """A MapDataPipe is a map dataset: indices from a sampler, torch's batches."""
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "num_workers": workers, "shuffle": shuffle}
    got, expected = both(kind, lambda: SequenceWrapper(range(10)).map(double), **options)
    assert_same(got.epochs, expected.epochs)
    assert sorted(int(x) for batch in got.epochs[0] for x in batch) == [2 * i for i in range(10)]
    got, expected = both(kind, lambda: SequenceWrapper(range(10)).shuffle().map(double), **{**options, "shuffle": None})
    assert_same(got.epochs, expected.epochs)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_share_a_seed_each_epoch(kind: str, persistent: bool) -> None:
    """The workers' shards together are the whole in each epoch, and each epoch has another order."""
    run = run_loader(kind, shuffled(), epochs=3, num_workers=3, batch_size=None, persistent_workers=persistent)
    values = [[int(x) for x in epoch] for epoch in run.epochs]
    assert [sorted(epoch) for epoch in values] == [list(range(24))] * 3
    assert len({tuple(epoch) for epoch in values}) == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_shared_seed_is_drawn_from_the_generator(workers: int, persistent: bool) -> None:
    """With `generator=` the shared seeds are drawn from it, as often as torch's, and at the same moments."""

    def run(make: Any) -> Any:
        generator = torch.Generator().manual_seed(12)
        options = {"num_workers": workers, "persistent_workers": persistent and bool(workers)}
        loader = make(Seeded(shuffled()), generator=generator, batch_size=3, collate_fn=identity, **options)
        found: list[Any] = []
        for _ in range(3):
            batches = iter(loader)
            found += [generator.get_state(), list(batches), generator.get_state()]
        return found

    torch.manual_seed(0)
    expected = run(torch.utils.data.DataLoader)
    torch.manual_seed(0)
    assert_same(run(DataLoader), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_left_in_the_middle(workers: int) -> None:
    """The next epoch begins at the beginning, with the next seed, as in torch."""

    def run(make: Any) -> Any:
        torch.manual_seed(2)
        loader = make(shuffled(), num_workers=workers, persistent_workers=bool(workers), batch_size=2)
        found = []
        for taken in (12, 3, 12, 1, 12):
            batches = iter(loader)
            found.append([next(batches) for _ in range(taken)])
            del batches
        return found

    got = run(DataLoader)
    assert_same(got, run(torch.utils.data.DataLoader))
    assert [sorted(int(x) for batch in got[i] for x in batch) for i in (0, 2, 4)] == [list(range(24))] * 3


def sees_its_shard(worker: int) -> None:
    """A user's init function: the pipe's shard has been set before it is called."""
    info = get_worker_info()
    assert info is not None
    pipes: list[Any] = get_all_graph_pipes(traverse_dps(info.dataset))  # type: ignore[arg-type]
    (shard,) = [pipe for pipe in pipes if hasattr(pipe, "apply_sharding")]
    assert (shard.instance_id, shard.num_of_instances) == (worker, info.num_workers)
    shard.source_datapipe = shard.source_datapipe.map(double)


@pytest.mark.parametrize("kind", BOTH)
def test_worker_init_fn_comes_after_sharding(kind: str) -> None:
    """The user's function finds the shard applied, and its changes take effect."""
    options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": sees_its_shard, "batch_size": None}
    got, expected = both(kind, shuffled, **options)
    assert_same(got.epochs, expected.epochs)
    assert sorted(int(x) for x in got.epochs[0]) == [2 * i for i in range(24)]


@pytest.mark.parametrize("workers", [0, 1])
def test_sharding_twice_is_refused(workers: int) -> None:
    """torch's RuntimeError is raised, at the same place as in torch."""

    def twice() -> Any:
        return IterableWrapper(range(6)).sharding_filter().map(double).sharding_filter()

    (expected,) = steps(torch.utils.data.DataLoader, twice(), 1, num_workers=workers)
    (got,) = steps(DataLoader, twice(), 1, num_workers=workers)
    assert got[0] is expected[0] is RuntimeError
    assert "Sharding twice on a single pipeline" in got[1]
    assert got[1].splitlines()[0] == expected[1].splitlines()[0]


class Squares(MapDataPipe[int]):
    """A user's map pipe."""

    def __getitem__(self, index: Any) -> int:
        return int(index) ** 2

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pipes_travel_to_spawned_workers(method: str) -> None:
    """Pipes of torch and of the user reach the workers, forked or pickled in their wrapper."""
    options: dict[str, Any] = {"num_workers": 1, "batch_size": 2, "multiprocessing_context": method}
    assert [b.tolist() for b in DataLoader[Any](Squares(), **options)] == [[0, 1], [4, 9], [16, 25]]
    torch.manual_seed(6)
    got = list(DataLoader[Any](Seeded(shuffled()), **options))
    torch.manual_seed(6)
    assert_same(got, list(torch.utils.data.DataLoader(Seeded(shuffled()), num_workers=1, batch_size=2)))
