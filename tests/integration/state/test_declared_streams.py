"""Datasets that say by `loader_streams` that they are a number of streams: the workers are no part of their batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe, get_worker_info

from asyncloader import DataLoader, RemoteIterableDataset, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.declared_streams import Drawless, Growing, Streams, mark, runs_within, take_around_a_kill
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def process_generators() -> Any:
    ours: Any = np.random.get_state(legacy=False)
    return random.getstate(), ours["state"]["key"].tolist(), ours["state"]["pos"]


def batches(workers: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with Stepwise("sync", Streams(), batch_size=2, num_workers=workers, **options) as run:
        return run.epoch()


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"seed": 5, "drop_last": True}], ids=["torch", "seeded", "full"])
def test_the_batches_are_the_same_on_any_number_of_workers(options: dict[str, Any]) -> None:
    """In turn from each stream that has data left, with the stream's own random numbers, which `worker_init_fn` draws
    from, too.
    """
    options = {"worker_init_fn": mark, **options}
    before = process_generators()
    expected = batches(0, **options)
    assert process_generators() == before
    assert get_worker_info() is None
    order = [int(batch[0, 0]) for batch in expected]
    full = "drop_last" in options
    assert order == ([0, 1, 2, 4, 0, 2, 4, 0, 2, 4, 2, 2] if full else [0, 1, 2, 4, 0, 1, 2, 4, 0, 2, 4, 0, 2, 2, 2])
    for workers in (2,) if options.get("seed") else (3, 7):
        assert_same(batches(workers, multiprocessing_context="fork", **options), expected, f"{workers} workers")


def test_a_worker_that_is_killed_while_it_serves_several_streams() -> None:
    """Each of its streams goes on where it was, in an epoch that was begun or resumed; and a state that is saved
    afterwards goes on without workers.
    """
    options: dict[str, Any] = {"batch_size": 2, "seed": 5}
    expected = batches(0, seed=5)
    got: list[torch.Tensor] = []
    state: dict[str, Any] = {}
    for workers, before in ((2, 3), (3, 0)):
        with Stepwise("sync", Streams(), num_workers=workers, multiprocessing_context="fork", **options) as run:
            run.loader.load_state_dict(state)
            got += take_around_a_kill(run, before)
            state = run.loader.state_dict()
            assert_same([*got, *run.rest()], expected)
            assert run.loader.stats()["data/worker_restarts"] == 1
    with Stepwise("sync", Streams(), **options) as run:
        run.loader.load_state_dict(state)
        assert_same(run.epoch(), expected[9:])


def test_a_worker_that_leaves_hands_on_the_generators_of_each_stream() -> None:
    """Without `seed=` a worker that exceeds its memory limit has the states of all its streams' generators."""
    here, with_workers = runs_within(Growing(), batch_size=2)
    assert_same(with_workers, here)


def test_persistent_workers_have_their_copies_until_the_streams_change() -> None:
    """Each epoch reads the copies on; another number of streams has new workers."""
    dataset = Streams()
    with Stepwise("sync", dataset, batch_size=2, num_workers=2, seed=5, persistent_workers=True) as run:
        pids = {worker.pid for worker in (run.begin(), run.rest())[0]._workers}
        assert pids == {worker.pid for worker in run.begin()._workers}
        assert len(run.rest()) == 15
        dataset.lengths, dataset.loader_streams = [2, 4, 2], 3
        assert pids.isdisjoint(worker.pid for worker in run.begin()._workers)
        assert [int(batch[0, 0]) for batch in run.rest()] == [0, 1, 2, 1]


class Failing(Streams):
    """A stream that raises between two samples."""

    def sample(self, info: Any) -> torch.Tensor:
        if (info.id, self.next) == (2, 4):
            self.next += 1
            raise OSError("bad record")
        return super().sample(info)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_a_stream_names_it(workers: int) -> None:
    """A generator that has raised is over; the other streams go on, also from a state, on other workers."""
    with Stepwise("sync", Failing(), batch_size=2, num_workers=workers, seed=5) as run:
        run.begin()
        before = run.take(6)
        with pytest.raises(OSError, match="bad record") as caught:
            run.step()
        assert any("sample number 3 of stream 2" in note for note in [*caught.value.__notes__, str(caught.value)])
        state = run.loader.state_dict()
        rest = run.rest()
    assert [int(batch[0, 0]) for batch in [*before, *rest]] == [0, 1, 2, 4, 0, 1, 4, 0, 4, 0]
    with Stepwise("sync", Failing(), batch_size=2, num_workers=1 - workers // 2, seed=5) as run:
        run.loader.load_state_dict(state)
        run.begin()
        with pytest.raises(OSError, match="bad record"):  # which the user may have mended meanwhile
            run.step()
        assert_same(run.rest(), rest)


def test_threads_serve_streams() -> None:
    """Worker threads give the same samples in the same order; their random numbers are not the process's."""
    with Stepwise("sync", Drawless(), batch_size=2, num_workers=2, workers="threads", seed=5) as run:
        got = run.epoch()
    with Stepwise("sync", Drawless(), batch_size=2, seed=5) as run:
        assert_same(got, run.epoch())


# ------------------------------------------------------------------------------------------- refusals


def state_after(count: int, dataset: Any, **options: Any) -> dict[str, Any]:
    with Stepwise("sync", dataset, batch_size=2, **options) as run:
        run.begin()
        run.take(count)
        state: dict[str, Any] = run.loader.state_dict()
        return state


def test_another_number_of_streams_is_refused() -> None:
    """Both numbers are named, and which one can be had without the attribute."""
    state = state_after(3, Streams())
    without = state_after(3, Streams([9], loader_streams=None), num_workers=1)
    for saved, here, text in (
        (state, Streams([4, 4]), "loader_streams=5 on the dataset, but here it has loader_streams=2"),
        (state, Streams(loader_streams=None), "loader_streams=5 on the dataset, but here it has no such attribute"),
        (without, Streams([9]), "num_workers=1, where the dataset had no loader_streams"),
    ):
        with Stepwise("sync", here, batch_size=2, num_workers=1) as run, pytest.raises(StateError, match=text):
            run.loader.load_state_dict(saved)
    with Stepwise("sync", (dataset := Streams()), batch_size=2) as run:
        run.loader.load_state_dict(state)
        dataset.loader_streams = 6
        with pytest.raises(StateError, match="loader_streams=5 on the dataset, but here it has loader_streams=6"):
            run.begin()


class Raising(Streams):
    """A dataset that cannot say how many streams it is."""

    @property
    def loader_streams(self) -> int:
        raise AttributeError("no index yet")

    @loader_streams.setter
    def loader_streams(self, value: int) -> None:
        pass


class Shards(RemoteIterableDataset):
    """A dataset whose shards the loader assigns."""

    loader_streams = 2


class Awaited(Streams):
    """An asynchronous dataset."""

    def __aiter__(self) -> Any:
        raise AssertionError


class Piped(IterDataPipe[Any]):
    """A datapipe."""

    loader_streams = 2

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "kind", "text"),
    [
        (Streams(loader_streams=0), ValueError, "from 1 to 1,024, but that of the Streams is 0"),
        (Streams(loader_streams=-1), ValueError, "but that of the Streams is -1"),
        (Streams(loader_streams=10**6), ValueError, "but that of the Streams is 1,000,000"),
        (Streams(loader_streams=1 << 20000), ValueError, "is a number of 20,001 bits"),
        (Streams(loader_streams=True), TypeError, "should be an integer.*is True"),
        (Streams(loader_streams="5"), TypeError, "should be an integer.*is '5'"),
        (Raising(), AttributeError, "no index yet"),
        (Awaited(), TypeError, "its samples are awaited .* so it cannot be read as several streams"),
        (Piped(), TypeError, "it is a datapipe, .* so it cannot be read as several streams"),
        (Shards("none.tar"), TypeError, "its shards are assigned to the workers while they read"),
    ],
)
def test_what_loader_streams_cannot_be(dataset: Any, kind: type[Exception], text: str) -> None:
    """The constructor refuses it, with the value."""
    with pytest.raises(kind, match=text):
        DataLoader(dataset, batch_size=2)


def test_a_dataset_that_cannot_be_copied() -> None:
    """Streams in one process need copies, and must not share what cannot be copied."""
    with Path(__file__).open() as file:
        with (
            Stepwise("sync", Streams(file=file), batch_size=2) as run,
            pytest.raises(TypeError, match="each stream needs a Streams of its own, which cannot be copied"),
        ):
            run.begin()
        with Stepwise("sync", Streams([3], file=file), num_workers=1, multiprocessing_context="fork") as run:
            assert len(run.epoch()) == 3
