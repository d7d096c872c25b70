"""Graph functions, seeds, adapters, the linter, serialization."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import Mapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import asyncloader.dataloader2.graph as graph_module
from asyncloader.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from asyncloader.dataloader2.adapter import (
    Adapter,
    CacheTimeout,
    FullSync,
    PinMemory,
    PrefetchPolicy,
    ShardingPolicy,
    Shuffle,
)
from asyncloader.dataloader2.graph import (
    find_dps,
    list_dps,
    remove_dp,
    replace_dp,
    set_datapipes_seed,
    set_graph_random_seed,
    traverse_dps,
)
from asyncloader.dataloader2.graph._serialization import (
    clone,
    deserialize_datapipe,
    serialize_datapipe,
)
from asyncloader.dataloader2.graph.utils import (
    _DummyIterDataPipe,
    _find_replicable_branches,
    end_of,
    find_lca_round_robin_sharding_dp,
    find_non_dispatching_branches,
)
from asyncloader.dataloader2.linter import _check_shuffle_before_sharding
from asyncloader.dataloader2.random import SeedGenerator
from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.dataloader2.utils.worker import WorkerInfo, worker_graph
from tests.dataloader2.parts import MP, OnlyHere, Seeded, double, numbers, odd, total


class Kept(Mapper[Any]):
    """A subclass, which `find_dps` does not take for its base."""


def test_names() -> None:
    """`__all__` is that of `torchdata.dataloader2.graph`."""
    assert graph_module.__all__ == [
        *("DataPipe", "DataPipeGraph", "find_dps", "list_dps", "remove_dp", "replace_dp", "set_datapipes_seed"),
        *("set_graph_random_seed", "traverse_dps"),
    ]


def _diamond() -> Any:
    source = numbers(6)
    left, right = source.map(double), source.filter(odd)
    far = left.map(double)
    joined = far.zip(right)
    return source, left, right, far, joined, joined.map(total)


def test_list_and_find() -> None:
    """List parts breadth first, each once, without excluded parts and their sources; find parts by exact class."""
    source, left, right, far, joined, end = _diamond()
    graph = traverse_dps(end)
    assert list_dps(graph) == [end, joined, far, right, left, source]
    assert list_dps(graph, exclude_dps=far) == [end, joined, right]
    assert list_dps(graph, exclude_dps=[left, right]) == [end, joined, far]
    assert find_dps(graph, Mapper) == [end, far, left]
    assert find_dps(traverse_dps(Kept(source, double)), Mapper) == []
    assert end_of(graph) is end


def test_replace() -> None:
    """A part is replaced in the middle, at the end, and by a part that reads from the replaced part."""
    _, left, right, _, joined, end = _diamond()
    graph = replace_dp(traverse_dps(end), left, numbers(3, 10))
    assert left not in list_dps(graph)
    assert list(joined) == [(20, 1), (22, 3), (24, 5)]
    assert end_of(replace_dp(graph, end, joined)) is joined
    wrapped = right.map(double)
    replace_dp(traverse_dps(end), right, wrapped)
    assert list(joined) == [(20, 2), (22, 6), (24, 10)]
    assert wrapped.datapipe is right
    source = numbers(3)
    left, right = source.map(double), source.map(double)
    wrapped = left.map(double)
    replace_dp(traverse_dps(left.zip(right)), source, wrapped)
    assert [left.datapipe, right.datapipe] == [source, wrapped]
    first, second = numbers(4).fork(2)
    forked = first.zip(second)
    replace_dp(traverse_dps(forked), first.main_datapipe.main_datapipe, numbers(2, 7))
    assert list(forked) == [(7, 7), (8, 8)]


def test_remove() -> None:
    """The readers of a removed part read from its source; the errors have the documented messages."""
    source, left, _, far, joined, end = _diamond()
    graph = remove_dp(traverse_dps(end), far)
    assert joined.datapipes[0] is left
    assert end_of(remove_dp(graph, end)) is joined
    with pytest.raises(RuntimeError, match=r"^Cannot remove the source DataPipe from the graph of DataPipe$"):
        remove_dp(traverse_dps(end), source)
    words = "^Cannot remove the receiving DataPipe having multiple sending DataPipes$"
    with pytest.raises(RuntimeError, match=words):
        remove_dp(traverse_dps(end), joined)


def test_set_seeds() -> None:
    """Parts up to each filter get shared seeds, parts after it own seeds; other parts use up no seed."""
    source = Seeded(numbers(1))
    middle = Seeded(source.sharding_filter())
    beside = Seeded(numbers(1))
    end = Seeded(middle.zip(beside))
    seeds = []
    for worker in range(2):
        assert set_graph_random_seed(end, SeedGenerator(4).spawn(worker)) is end
        seeds.append([each.seed for each in (source, middle, beside, end)])
    assert seeds[0][0] == seeds[1][0]
    assert all(zero != one for zero, one in zip(seeds[0][1:], seeds[1][1:], strict=True))
    set_datapipes_seed([source, numbers(1)], SeedGenerator(4), distributed_shared=True)
    assert source.seed == seeds[0][0] == SeedGenerator(4).generate_shared_seed()


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 50))
def test_seed_generator(seed: int, worker: int) -> None:
    """Shared seeds are equal in all workers, own seeds differ; both follow from the seed; a pickled copy continues."""
    one, two = SeedGenerator(seed).spawn(worker), SeedGenerator(seed).spawn(worker + 1)
    assert one.generate_shared_seed() == two.generate_shared_seed() == SeedGenerator(seed).generate_shared_seed()
    drawn = [one.generate_seed() for _ in range(4)]
    assert len({*drawn, *(two.generate_seed() for _ in range(4))}) == 8
    assert drawn == [(again := SeedGenerator(seed).spawn(worker)).generate_seed()] + [
        again.generate_seed() for _ in "123"
    ]
    assert pickle.loads(pickle.dumps(one)).generate_seed() == one.generate_seed()
    here = SeedGenerator(seed)
    assert here.spawn(worker, inplace=True) is here
    assert here.generate_seed() == drawn[0]
    assert all(0 <= each < 1 << 64 for each in drawn)


def test_seed_generator_refuses() -> None:
    """The documented errors."""
    with pytest.raises(AssertionError, match=r"^Please provide seed to PhiloxEngine$"):
        PhiloxEngine().generate()
    with pytest.raises(AssertionError, match=r"^Expected a non-negative value for spawn, but found -1$"):
        PhiloxEngine(1).spawn(-1)
    with pytest.raises(ValueError, match="Expected `rank` equal or larger than 0, but got -1"):
        SeedGenerator(1).spawn(-1)
    with pytest.raises(ValueError, match=r"^Expected an uint64 seed, but got"):
        SeedGenerator(1 << 64)
    before = PhiloxEngine(3)
    copied = before.clone()
    assert [before.generate() for _ in range(3)] == [copied.generate() for _ in range(3)]


def test_philox_is_philox() -> None:
    """Known answers of Philox 4x32-10 (Random123's kat_vectors): the counter's and key's words all 0."""
    assert PhiloxEngine(0).generate() == 0xE169C58D << 32 | 0x6627E8D5  # the first two of the block's four words


def test_branches() -> None:
    """The largest replicable branches, the part where dispatching branches meet, and branches beside it are found."""
    graph = OnlyHere(numbers(3).map(double)).zip(numbers(3))
    left, right = _find_replicable_branches(traverse_dps(graph))
    assert [type(left).__name__, type(right).__name__] == ["MapperIterDataPipe", "IterableWrapperIterDataPipe"]
    one = numbers(3).sharding_round_robin_dispatch(MP)
    two = numbers(3).sharding_round_robin_dispatch(MP)
    both = one.zip(two)
    beside = numbers(4).map(double)
    end = both.map(total).zip(beside)
    assert find_lca_round_robin_sharding_dp(traverse_dps(end)) is both
    assert find_lca_round_robin_sharding_dp(traverse_dps(one.map(double))) is one
    assert find_lca_round_robin_sharding_dp(traverse_dps(beside)) is None
    assert beside in find_non_dispatching_branches(traverse_dps(end))
    assert find_non_dispatching_branches(traverse_dps(beside)) == [beside]


def test_a_filter_behind_the_dispatching_process() -> None:
    """It keeps the items that the process has dealt to a worker. A filter beside it keeps the worker's part."""
    graph: Any = _DummyIterDataPipe().sharding_filter().zip(numbers(12).sharding_filter())
    mine: Any = worker_graph(graph, WorkerInfo(2, 1), None, numbers(6))
    assert list(mine) == list(zip(range(6), range(1, 12, 2), strict=True))


def test_linter() -> None:
    """A filter needs a shuffle before it; a graph without a filter is right."""
    assert _check_shuffle_before_sharding(numbers(3))
    assert not _check_shuffle_before_sharding(numbers(3).sharding_filter())
    assert _check_shuffle_before_sharding(numbers(3).shuffle().sharding_filter())
    assert not _check_shuffle_before_sharding(numbers(3).sharding_filter().shuffle())


def test_serialization() -> None:
    """A graph is restored from its bytes; a graph that cannot be pickled, or read, is a NotImplementedError."""
    graph = numbers(3).map(double)
    found: Any = deserialize_datapipe(serialize_datapipe(graph))
    assert list(found) == [0, 2, 4]
    assert clone(graph) is not graph
    with pytest.raises(NotImplementedError, match="must be picklable"):
        serialize_datapipe(Seeded(iter(())).map(__import__("threading").Lock().acquire))
    with pytest.raises(NotImplementedError, match="cannot be read"):
        deserialize_datapipe(b"nonsense")


def adapted(graph: Any, *adapters: Any) -> Any:
    return DataLoader2[Any](graph, adapters, InProcessReadingService())


def test_shuffle_adapter() -> None:
    """Shuffles are on, off or unchanged; a missing shuffle is added with a warning; a single adapter needs no list."""
    assert list(adapted(numbers(30).shuffle(), Shuffle(False))) == list(range(30))
    assert list(adapted(numbers(30).shuffle().set_shuffle(False), Shuffle())) != list(range(30))
    assert list(adapted(numbers(30).shuffle().set_shuffle(False), Shuffle(None))) == list(range(30))
    with pytest.warns(UserWarning, match=r"does not contain a `Shuffler`. Adding one at the end"):
        loader = DataLoader2[int](numbers(30), Shuffle(True), InProcessReadingService())
    found = list(loader)
    assert found != sorted(found) == list(range(30))


class _WaitPendingCacheItemOfTheirs(Seeded):
    """Its class is named like the waiting part of torchdata's caches."""

    def set_timeout(self, timeout: int) -> None:
        self.seed = timeout


def test_cache_timeout() -> None:
    """It reaches the waiting parts of a cache; values that are no integers are refused with the documented message."""
    loader = adapted(_WaitPendingCacheItemOfTheirs(numbers(1)).map(double), CacheTimeout(7))
    assert [seed for _, seed in loader.datapipe.datapipe] == [7]
    for bad in ("a", None, 1.5):
        with pytest.raises(ValueError, match=r"^timeout should be integer$"):
            CacheTimeout(bad)  # type: ignore[arg-type]


def test_ends_that_adapters_add() -> None:
    """`FullSync` and `PinMemory` end a graph once; without a GPU page-locking is refused."""
    loader = adapted(numbers(2), FullSync(5), FullSync(6))
    assert loader.datapipe.timeout == 5
    assert [type(each).__name__ for each in list_dps(traverse_dps(loader.datapipe))].count("FullSync") == 1
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="can only be used when CUDA is available"):
            adapted(numbers(2), PinMemory())


def test_sharding_policy() -> None:
    """Items are shared among workers alone, ranks alone, or both; the priority is checked, and a filter required."""
    for priority, expected in (
        (None, [0, 1, 2, 3]),
        (SHARDING_PRIORITIES.DEFAULT, [0, 1, 2, 3]),
        (MP, [0, 1, 2, 3]),
        (SHARDING_PRIORITIES.DISTRIBUTED, [0, 0, 1, 1, 2, 2, 3, 3]),
    ):
        service = MultiProcessingReadingService(2)
        with DataLoader2[int](numbers(4).sharding_filter(), ShardingPolicy(priority), service) as loader:
            assert list(loader) == expected
    with pytest.raises(TypeError, match="priority must be one of"):
        ShardingPolicy("all")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs a `sharding_filter`"):
        adapted(numbers(2), ShardingPolicy())


def test_prefetch_policy() -> None:
    """It sets the sizes, adds a missing part, and removes all parts at 0."""
    two = adapted(numbers(3).prefetch(9).map(double).prefetch(9), PrefetchPolicy(2))
    assert [each.buffer_size for each in list_dps(traverse_dps(two.datapipe)) if hasattr(each, "buffer_size")] == [2, 2]
    assert adapted(numbers(3), PrefetchPolicy(4)).datapipe.buffer_size == 4
    none = adapted(numbers(3).prefetch(9).map(double).prefetch(9), PrefetchPolicy(0))
    assert [type(each).__name__ for each in list_dps(traverse_dps(none.datapipe))] == [
        "MapperIterDataPipe",
        "IterableWrapperIterDataPipe",
    ]
    assert list(none) == [0, 2, 4]
    with pytest.raises(ValueError, match="buffer_size must be at least 0, not -1"):
        PrefetchPolicy(-1)


class _Doubling(Adapter):
    def __call__(self, datapipe: Any) -> Any:
        return datapipe.map(double)


def test_an_adapter_of_the_users() -> None:
    """Adapters may derive from the base class, or be any function; they are applied in their order."""
    assert list(adapted(numbers(3), _Doubling(), _Doubling())) == [0, 4, 8]
    assert list(adapted(numbers(3), lambda datapipe: datapipe.map(double))) == [0, 2, 4]
