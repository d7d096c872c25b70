"""num_workers="auto": where it is refused, what a loader shows of it, and the trial."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, RemoteIterableDataset, definition
from asyncloader.base.cpus import usable_cpus
from asyncloader.dataloader2 import MultiProcessingReadingService
from asyncloader.loaders import worker_trial
from asyncloader.options.auto import first_number
from tests.helpers.comparing import assert_same
from tests.helpers.seeded_datasets import Rows

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@definition
def rows(length: int) -> Rows:
    return Rows(length)


class Stream(IterableDataset[Any]):
    """An empty stream."""

    def __iter__(self) -> Any:
        return iter(())


class WithState(Rows):
    """A map dataset with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class Unsized:
    """A map dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Rows):
    """Samples with random numbers of the worker."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, float(torch.rand(())), random.random(), float(np.random.random())])


class Broken(Rows):
    """Every sample raises."""

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(f"sample {index} is broken")


def choice(loader: Any) -> Any:
    """The loader's choice of the number."""
    return getattr(loader, "_asyncloader_spec", loader)._asyncloader_choice


@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (Stream(), {"seed": 1}, "a stream is read by the workers in parts"),
        (RemoteIterableDataset("/nowhere/", streams=2), {"seed": 1}, "a stream is read by the workers in parts"),
        (WithState(4), {"seed": 1}, "each worker has a copy"),
        (Rows(4), {"workers": "threads"}, "draw from this process's random numbers"),
        (Unsized(), {"sampler": [0, 1]}, "whose length is unknown"),
        (Rows(4), {"batch_sampler": [[0], [1]]}, "batch_sampler of another class"),
    ],
    ids=["stream", "shards", "state", "threads", "unsized", "batch sampler"],
)
def test_refusals(dataset: Any, options: dict[str, Any], reason: str) -> None:
    """At construction, with the reason and what to do."""
    with pytest.raises(ValueError, match=reason) as raised:
        DataLoader(dataset, num_workers="auto", **options)
    assert str(raised.value).endswith("Give a number")


def test_refusals_of_others() -> None:
    """An async loader, workers that are torch's own, a service, a reading service, another text."""
    with pytest.raises(ValueError, match="the event loop of an AsyncDataLoader"):
        AsyncDataLoader(Rows(4), num_workers="auto")
    with pytest.raises(ValueError, match="the service's"):
        DataLoader(rows(4), num_workers="auto", seed=1, workers="tcp://127.0.0.1:1")
    with pytest.raises(TypeError, match="a number of processes"):
        MultiProcessingReadingService(num_workers="auto")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_workers should be an integer"):
        DataLoader(Rows(4), num_workers="many")  # type: ignore[arg-type]


def test_the_attribute() -> None:
    """It is the number to begin with; copies and clones choose anew."""
    loader = DataLoader[Any](Rows(64), num_workers="auto", seed=1)
    assert loader.num_workers == min(usable_cpus(), 4)
    for other in (loader.clone(), pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert choice(other) not in (None, choice(loader))
    assert loader.clone(num_workers=0).num_workers == 0
    assert choice(loader.clone(num_workers=3)) is None
    assert choice(DataLoader[Any](Rows(64)).clone(num_workers="auto", seed=2)) is not None
    assert_same(loader.batch_at(7), DataLoader[Any](Rows(64), seed=1).batch_at(7))


@pytest.mark.parametrize("name", ["prefetch_factor", "concurrency"])
def test_other_options_are_numbers(name: str) -> None:
    """An error says what measures some."""
    with pytest.raises((TypeError, ValueError), match=f"{name} should be .*asyncloader try"):
        DataLoader(Rows(64), num_workers=1, **{name: "auto"})  # type: ignore[arg-type]


def test_open_files_bound_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take no more than half of them; those that there are stay."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (140, 4096))
    for there, most in ((2, 10), (12, 12)):
        worker = SimpleNamespace(pid=0)
        batches = SimpleNamespace(_workers=[worker] * there, _config=SimpleNamespace(concurrent=False))
        assert worker_trial._room(batches) == (most, "half of the open files of a process (ulimit -n): 70")


def test_memory_bounds_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take half of what is free without them, by the largest of the first."""
    monkeypatch.setattr(worker_trial, "memory_limit", lambda: (100 << 20, "here"))
    monkeypatch.setattr(worker_trial, "private_bytes", lambda pid: pid << 20)
    batches = SimpleNamespace(
        _workers=[SimpleNamespace(pid=8), SimpleNamespace(pid=10)], _config=SimpleNamespace(concurrent=False)
    )
    most, limit = worker_trial._room(batches)
    assert most == 6
    assert "100 MiB" in limit


@pytest.mark.parametrize(
    ("rates", "most", "chosen"), [((10, 18, 30, 31), 64, 16), ((10, 11), 64, 4), ((10, 19, 40), 6, 6), ((0,), 64, 4)]
)
def test_it_doubles_as_long_as_that_is_worth_it(
    rates: tuple[int, ...], most: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the room that there is; and no further than a number that is not clearly faster."""
    given = iter(rates)
    tried: list[int] = []

    def rate(_: Any, workers: int, __: float) -> tuple[float, int, str]:
        tried.append(workers)
        return next(given), most, "the CPUs"

    monkeypatch.setattr(worker_trial, "_rate", rate)
    monkeypatch.setattr("asyncloader.options.auto.usable_cpus", lambda: 8)
    with DataLoader[Any](Rows(8), num_workers="auto", seed=1) as loader:
        assert len(list(loader)) == 8
        assert loader.num_workers == choice(loader).number == chosen
        assert loader.stats()["data/num_workers"] == chosen
        before = len(tried)
        assert len(list(loader)) == 8
        assert len(tried) == before  # one trial


@pytest.mark.parametrize("persistent", [False, True])
def test_the_batches_are_those_of_the_number(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a trial the batches of two epochs, and all generators, are those of a loader with the chosen number."""
    monkeypatch.setattr(worker_trial, "_READING_S", 0.0)

    def run(workers: Any) -> Any:
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
        sampler = torch.utils.data.RandomSampler(Drawing(24), generator=torch.Generator().manual_seed(3))
        with DataLoader[Any](
            Drawing(24), batch_size=4, sampler=sampler, num_workers=workers, persistent_workers=persistent
        ) as loader:
            found = [list(loader) for _ in range(2)]
            explained = loader.explain()
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        return found, states, (loader.num_workers, explained)

    found, states, (number, explained) = run("auto")
    assert f"num_workers: has {number}, after a trial of" in explained
    expected, expected_states, _ = run(number)
    assert_same(found, expected)
    assert_same(states, expected_states)


def test_a_trial(caplog: pytest.LogCaptureFixture) -> None:
    """It measures workers of its own; the log says at its start what the first batch waits for."""
    caplog.set_level(logging.INFO, "asyncloader")
    with DataLoader[Any](Rows(8), num_workers="auto", multiprocessing_context="fork") as loader:
        assert len(list(loader)) == 8
        assert loader.num_workers >= first_number()
    assert "on random samples, 3 s at most, before the first epoch" in caplog.messages[0]
    assert "samples/s instead of" in loader.explain() or "the trial's time was over" in loader.explain()


def test_a_trial_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The epoch raises the error in its place; the log has it, too."""
    with (
        caplog.at_level(logging.WARNING, "asyncloader"),
        DataLoader[Any](Broken(8), num_workers="auto") as loader,
        pytest.raises(RuntimeError, match="sample 0 is broken"),
    ):
        next(iter(loader))
    assert "the trial failed with RuntimeError" in caplog.text


def test_a_number_that_is_set_later() -> None:
    """It ends the choice; "auto" is for the constructor, and for `clone`."""
    loader: Any = DataLoader[Any](Rows(40), batch_size=4, seed=1, num_workers="auto")
    with pytest.raises(ValueError, match="is fixed when a loader is made"):
        loader.num_workers = "auto"
    loader.num_workers = 2
    assert choice(loader) is None
    awaited: Any = AsyncDataLoader[Any](Rows(4))
    with pytest.raises(ValueError, match="the event loop of an AsyncDataLoader"):
        awaited.num_workers = "auto"


def test_an_empty_dataset(caplog: pytest.LogCaptureFixture) -> None:
    """Has an empty epoch, without a trial; the first epoch with samples has it."""
    dataset = Rows(0)
    with DataLoader[Any](dataset, num_workers="auto") as loader:
        assert list(loader) == []
        assert list(loader) == []
        assert not choice(loader).chosen
    assert "trial" not in caplog.text
