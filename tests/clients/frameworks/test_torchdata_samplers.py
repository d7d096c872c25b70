"""Our samplers with a state beside torchdata's: the same orders, draws and resumed runs, in torchdata's own loader."""

from __future__ import annotations

import itertools
import json
from importlib import import_module
from typing import Any

import pytest

from asyncloader.samplers.stateful import StatefulDistributedSampler, StatefulRandomSampler
from tests.clients.frameworks.helping import draws, seed_all

pytestmark = [
    pytest.mark.clients,
    # torchdata's loader calls a function of torch that gives this warning.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

RANDOM = [
    pytest.param({}, id="permutation"),
    pytest.param({"num_samples": 7}, id="fewer"),
    pytest.param({"num_samples": 41}, id="more"),
    pytest.param({"num_samples": 34}, id="two permutations"),
    pytest.param({"replacement": True}, id="replacement"),
    pytest.param({"replacement": True, "num_samples": 100}, id="replacement, more"),
    pytest.param({"replacement": True, "num_samples": 64}, id="replacement, two blocks"),
]
SIZE = 17


@pytest.fixture(scope="module")
def theirs() -> Any:
    """torchdata's samplers."""
    return import_module("torchdata.stateful_dataloader.sampler")


@pytest.fixture(scope="module")
def loader() -> Any:
    """torchdata's loader."""
    return import_module("torchdata.stateful_dataloader").StatefulDataLoader


def batches(loader: Any, epochs: int = 1) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


class TestRandom:
    """`StatefulRandomSampler` and torchdata's `RandomSampler`."""

    @pytest.mark.parametrize("options", RANDOM)
    def test_orders_and_draws(self, theirs: Any, options: dict[str, Any]) -> None:
        """From the same seeds: the same four epochs, and the same numbers drawn from the global generators."""
        runs = []
        for make in (theirs.RandomSampler, StatefulRandomSampler):
            seed_all()
            sampler = make(range(SIZE), **options)
            runs.append(([list(sampler) for _ in range(4)], draws()))
        assert runs[1] == runs[0]

    @pytest.mark.parametrize("options", RANDOM)
    def test_abandoned_iterators(self, theirs: Any, options: dict[str, Any]) -> None:
        """Iterators left at any point, or never begun, leave the generator in the same state as torchdata's."""
        runs = []
        for make in (theirs.RandomSampler, StatefulRandomSampler):
            seed_all()
            sampler = make(range(SIZE), **options)
            length = len(sampler)
            runs.append([list(itertools.islice(sampler, stop)) for stop in (0, 1, length - 1, length, length + 1, 3)])
        assert runs[1] == runs[0]

    @pytest.mark.parametrize("options", RANDOM)
    def test_resumed(self, theirs: Any, options: dict[str, Any]) -> None:
        """From every position of the second epoch: the rest of that epoch and the next epoch are torchdata's."""
        runs = []
        for make in (theirs.RandomSampler, StatefulRandomSampler):
            run = []
            for stop in range(len(make(range(SIZE), **options)) + 1):
                seed_all()
                sampler = make(range(SIZE), **options)
                list(sampler)
                iterator = iter(sampler)
                list(itertools.islice(iterator, stop))
                state = iterator.state_dict()

                sampler = make(range(SIZE), **options)
                iterator = iter(sampler)
                iterator.load_state_dict(state)
                run.append((list(iterator), list(sampler)))
            runs.append(run)
        assert runs[1] == runs[0]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_in_their_loader(self, loader: Any, num_workers: int) -> None:
        """Given as `sampler=` there, it has the batches and draws of `shuffle=True`, with workers too."""
        runs = []
        for ours in (False, True):
            seed_all()
            data = range(SIZE)
            order = {"sampler": StatefulRandomSampler(data)} if ours else {"shuffle": True}
            runs.append((batches(loader(data, 3, num_workers=num_workers, **order), 3), draws()))
        assert runs[1] == runs[0]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_resumed_by_their_loader(self, loader: Any, num_workers: int) -> None:
        """Their loader keeps its state as JSON text and resumes mid-epoch; the epochs after it are the same, too."""

        def make(seed: int) -> Any:
            seed_all(seed)
            data = range(SIZE)
            return loader(data, 3, sampler=StatefulRandomSampler(data), num_workers=num_workers)

        expected = batches(make(1), 3)
        stopped = make(1)
        iterator = iter(stopped)
        head = [next(iterator).tolist() for _ in range(2)]
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = make(2)
        resumed.load_state_dict(state)
        rest = batches(resumed, 3)
        assert [head + rest[0], *rest[1:]] == expected


class TestDistributed:
    """`StatefulDistributedSampler` and torchdata's class of that name."""

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("replicas", [1, 3])
    def test_orders_and_states(self, theirs: Any, replicas: int, shuffle: bool, drop_last: bool) -> None:
        """On every rank, stopped at each index: the same state, rest and following epoch."""
        runs = []
        for make in (theirs.StatefulDistributedSampler, StatefulDistributedSampler):
            run = []
            for rank in range(replicas):
                sampler = make(range(SIZE), replicas, rank, shuffle, 5, drop_last)
                for stop in range(len(sampler) + 1):
                    sampler.set_epoch(stop)
                    head = list(itertools.islice(sampler, stop))
                    # Before the first index torchdata's sampler still has the count of the previous pass.
                    state = sampler.state_dict() if stop else {"yielded": 0}
                    resumed = make(range(SIZE), replicas, rank, shuffle, 5, drop_last)
                    resumed.set_epoch(stop)
                    resumed.load_state_dict(state)
                    pending = resumed.next_yielded
                    rest = list(resumed)
                    after = (resumed.yielded, resumed.next_yielded)
                    run.append((head, state, pending, rest, after, list(resumed)))
            runs.append(run)
        assert runs[1] == runs[0]

    @pytest.mark.parametrize("state", [{}, {"yielded": -1}], ids=["empty", "negative"])
    def test_errors(self, theirs: Any, state: dict[str, int]) -> None:
        """Our messages begin with torchdata's."""
        with pytest.raises(ValueError) as expected:
            theirs.StatefulDistributedSampler(range(SIZE), 1, 0).load_state_dict(state)
        with pytest.raises(ValueError) as got:
            StatefulDistributedSampler(range(SIZE), 1, 0).load_state_dict(state)
        assert str(got.value).startswith(str(expected.value))

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("size", [12, 11])
    @pytest.mark.parametrize("stop", [0, 2, 4, None], ids=["beginning", "middle", "last", "finished"])
    def test_resumed_by_their_loader(self, loader: Any, stop: int | None, size: int, num_workers: int) -> None:
        """The rest of the epoch; no batch after the last one; a whole epoch if it was finished."""

        def make() -> Any:
            data = range(size)
            return loader(data, 3, sampler=StatefulDistributedSampler(data, 1, 0), num_workers=num_workers)

        [whole] = batches(make())
        stopped = make()
        list(itertools.islice(stopped, stop))
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert batches(resumed, 2) == [whole[stop:], whole]
