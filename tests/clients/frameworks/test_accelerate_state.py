"""Runs that Accelerate saves within an epoch and resumes: the rest of that epoch, and the epochs after it."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import IterableDataset

from asyncloader import Recovery, StateError, StatefulDataLoader
from asyncloader.integrations.accelerate import adopt, prepare, skip_first_batches
from tests.clients.frameworks.accelerate_runs import OURS, STOCK, accelerator
from tests.clients.frameworks.helping import Rows, RowStream, batches_given, seed_all
from tests.helpers.comparing import assert_same, same

pytestmark = pytest.mark.usefixtures("accelerate_state")

ROWS, BATCH, EPOCHS = 29, 4, 3
STEPS = 8
MOMENTS = {"within an epoch": (0, 3), "within a later epoch": (1, 1), "last batch": (1, STEPS), "between": (1, 0)}
"""(epoch, batches of it that were delivered) when the run is saved."""


def seeded(num_workers: int, **options: Any) -> Any:
    """Rows with random numbers of all three generators, in the seed's order."""
    return OURS(Rows(ROWS), BATCH, shuffle=True, seed=5, num_workers=num_workers, **options)


def generated(num_workers: int, *, fresh: bool = False) -> Any:
    """Torch mode: the order comes from a generator, which a new process has seeded differently."""
    generator = torch.Generator().manual_seed(99 if fresh else 3)
    return OURS(torch.arange(ROWS), BATCH, shuffle=True, generator=generator, num_workers=num_workers)


def stateful(num_workers: int) -> Any:
    """Torch mode under torchdata's name: the order comes from the global generator, once."""
    dataset: Any = torch.arange(ROWS)
    return StatefulDataLoader(dataset, BATCH, shuffle=True, num_workers=num_workers)


def brought(loader: Any, **config: Any) -> tuple[Any, Any]:
    """Return a new accelerator, and the loader that it prepared."""
    running = accelerator(dataloader_config=DataLoaderConfiguration(**config))
    return running, prepare(running, loader)


def run_and_save(running: Any, shard: Any, moment: tuple[int, int], folder: Path) -> None:
    """Run up to this moment and save: in the loop if it is within an epoch."""
    epoch, step = moment
    for _ in range(epoch):
        list(shard)
    iterator = iter(shard) if step else iter(())
    for _ in range(step):
        next(iterator)
    running.save_state(str(folder))


def resumed(loader: Any, folder: Path, epochs: int, **config: Any) -> tuple[list[list[Any]], Any]:
    """Return the epochs that a new process reads from the saved state on, and the prepared loader."""
    running, shard = brought(loader, **config)
    running.load_state(str(folder))
    return [list(shard) for _ in range(epochs)], shard


# ------------------------------------------------------------------------------------- stop anywhere, resume exactly


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["seeded", "generator", "stateful"])
def test_resumed_runs_are_the_uninterrupted_one(kind: str, num_workers: int, tmp_path: Path) -> None:
    """Wherever `save_state` was called, a new process that calls `load_state` gets the remaining batches."""
    makers: dict[str, Any] = {"seeded": (seeded, seeded), "generator": (generated, lambda n: generated(n, fresh=True))}
    make, again = makers.get(kind, (stateful, stateful))
    seed_all()
    _, shard = brought(make(num_workers))
    expected = [list(shard) for _ in range(EPOCHS)]
    assert [len(epoch) for epoch in expected] == [STEPS] * EPOCHS
    assert not same(expected[0], expected[1])
    for name, (epoch, step) in MOMENTS.items():
        seed_all()
        run_and_save(*brought(make(num_workers)), (epoch, step), tmp_path / name)
        seed_all(8)
        first = [expected[epoch][step:]] if step < STEPS else []
        rest = first + expected[epoch + 1 :]
        got, shard = resumed(again(num_workers), tmp_path / name, len(rest))
        assert_same(got, rest, name)
        assert shard.iteration == EPOCHS


def test_seeded_state_loads_into_other_numbers_of_workers(tmp_path: Path) -> None:
    """A seeded run saved with two workers continues without workers, and the reverse, to the bit."""
    _, shard = brought(seeded(0))
    expected = [list(shard) for _ in range(2)]
    for before, after in ((2, 0), (0, 2)):
        folder = tmp_path / str(before)
        run_and_save(*brought(seeded(before)), (0, 5), folder)
        got, _ = resumed(seeded(after), folder, 2)
        assert_same(got, [expected[0][5:], expected[1]])


def test_state_of_a_loader_without_accelerate(tmp_path: Path) -> None:
    """A state that a prepared loader saved fits the loader itself, and the reverse."""
    _, shard = brought(seeded(0))
    expected = list(shard)
    iterator = iter(brought(seeded(0))[1])
    plain, (_, other) = seeded(0), brought(seeded(0))
    running = iter(plain)
    for _ in range(3):
        next(running)
    other.load_state_dict(plain.state_dict())
    assert_same(list(other), expected[3:])
    del iterator
    plain = seeded(0)
    _, other = brought(seeded(0))
    iterator = iter(other)
    for _ in range(2):
        next(iterator)
    plain.load_state_dict(other.state_dict())
    assert_same(list(plain), expected[2:])


@pytest.mark.thorough
def test_seedable_sampler(tmp_path: Path) -> None:
    """Accelerate's own seedable order, a function of the epoch's number, is restored with that number."""
    config: dict[str, Any] = {"use_seedable_sampler": True, "data_seed": 5}

    def make() -> Any:
        return OURS(torch.arange(ROWS), BATCH, shuffle=True, num_workers=2)

    _, shard = brought(make(), **config)
    expected = [list(shard) for _ in range(EPOCHS)]
    for epoch, step in ((1, 3), (1, STEPS)):
        run_and_save(*brought(make(), **config), (epoch, step), tmp_path / str(step))
        got, _ = resumed(make(), tmp_path / str(step), EPOCHS - epoch - (step == STEPS), **config)
        assert_same(got, ([expected[epoch][step:]] if step < STEPS else []) + expected[epoch + 1 :])


class Counted(IterableDataset[Any]):
    """A stream that knows its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < ROWS:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("dispatch", [None, False], ids=["dispatcher", "shard"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_with_a_state(num_workers: int, dispatch: Any, tmp_path: Path) -> None:
    """In one process a stream with a state continues from it, in both of Accelerate's wrappers."""
    config = {"dispatch_batches": dispatch}
    _, shard = brought(OURS(Counted(), BATCH, num_workers=num_workers), **config)
    expected = list(shard)
    run_and_save(*brought(OURS(Counted(), BATCH, num_workers=num_workers), **config), (0, 3), tmp_path)
    got, _ = resumed(OURS(Counted(), BATCH, num_workers=num_workers), tmp_path, 2, **config)
    assert_same(got, [expected[3:], expected])


def test_streams_without_a_state(tmp_path: Path) -> None:
    """Loading a stream without a state of its own is refused; with `allow_replay` the stream is read again."""
    _, shard = brought(OURS(RowStream(ROWS), BATCH, seed=1))
    expected = list(shard)
    run_and_save(*brought(OURS(RowStream(ROWS), BATCH, seed=1)), (0, 3), tmp_path)
    with pytest.raises(StateError, match="allow_replay"):
        resumed(OURS(RowStream(ROWS), BATCH, seed=1), tmp_path, 0)
    got, _ = resumed(OURS(RowStream(ROWS), BATCH, seed=1, recovery=Recovery(allow_replay=True)), tmp_path, 1)
    assert_same(got, [expected[3:]])


# ------------------------------------------------------------------------------------ the loaders that adopt makes


def test_state_before_the_first_batch(tmp_path: Path) -> None:
    """`save_state` before any batch saves the beginning; taking that state starts no worker and draws nothing."""
    seed_all()
    expected = torch.rand(())
    seed_all()
    running, shard = brought(OURS(torch.arange(ROWS), BATCH, shuffle=True, seed=3, num_workers=2))
    assert shard.state_dict()["step"] == 0
    assert torch.equal(torch.rand(()), expected)
    assert batches_given(shard.base_dataloader) == 0
    running.save_state(str(tmp_path))
    got, _ = resumed(OURS(torch.arange(ROWS), BATCH, shuffle=True, seed=3, num_workers=2), tmp_path, 1)
    assert_same(got, [list(shard)])


def test_the_epochs_number_is_kept(tmp_path: Path) -> None:
    """`set_epoch` of the prepared loader is saved with the state, although it never reached the loader inside."""
    running, shard = brought(generated(0))
    shard.set_epoch(7)
    iterator = iter(shard)
    next(iterator)
    running.save_state(str(tmp_path))
    _, again = resumed(generated(0), tmp_path, 0)
    assert again.iteration == 7
    assert again.state_dict()["iteration"] == 7
    again.load_state_dict({})
    assert len(list(again)) == STEPS


def test_prepare_begins_with_the_loaders_epoch() -> None:
    """An epoch that was set before `prepare` is the prepared loader's first."""
    loader, other = seeded(0), seeded(0)
    loader.set_epoch(2)
    other.set_epoch(2)
    assert_same(list(brought(loader)[1]), list(other))


def test_prepared_loader_pickles_with_its_state() -> None:
    """A copy made by pickle saves and loads its own state, not the original's."""
    _, shard = brought(seeded(0))
    again = pickle.loads(pickle.dumps(shard))
    iterator = iter(shard)
    for _ in range(3):
        next(iterator)
    assert again.state_dict()["step"] == 0
    again.load_state_dict(shard.state_dict())
    assert_same(list(again), list(iterator))
    assert (again.state_dict()["step"], again.iteration) == (STEPS, 1)


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_torchdatas_loader_is_exchanged() -> None:
    """With ``use_stateful_dataloader=True`` Accelerate makes torchdata's loader: it becomes ours of the same name."""
    theirs = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    running = accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    shard: Any = running.prepare(STOCK(torch.arange(ROWS), BATCH))
    assert type(shard.base_dataloader) is theirs
    assert type(adopt(shard).base_dataloader) is StatefulDataLoader
    assert type(prepare(running, seeded(0)).base_dataloader) is OURS
    plain = adopt(theirs(torch.arange(ROWS), BATCH, snapshot_every_n_steps=3))
    assert (type(plain), plain.snapshot_every_n_steps) == (StatefulDataLoader, 3)
    iterator = iter(shard)
    for _ in range(3):
        next(iterator)
    shard.load_state_dict(shard.state_dict())
    assert [batch.tolist() for batch in shard] == [list(range(i, min(i + BATCH, ROWS))) for i in range(12, ROWS, BATCH)]


def test_prepared_loader_goes_with_its_last_reference() -> None:
    """The object that keeps the state is in no cycle with the wrapper: its workers end without a collection."""
    mine = OURS(torch.arange(ROWS), BATCH)
    wrapper = adopt(DataLoaderShard(torch.arange(ROWS), batch_sampler=mine.batch_sampler), mine)
    gone = weakref.ref(wrapper)
    gc.disable()
    try:
        del wrapper
        assert gone() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------- skipping


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipping_in_seeded_mode(num_workers: int) -> None:
    """The batches after those skipped are the whole epoch's, random numbers included; each iteration skips."""
    _, shard = brought(seeded(num_workers))
    expected = list(shard)
    _, shard = brought(seeded(num_workers))
    skipping = skip_first_batches(shard, 3)
    assert len(skipping) == STEPS - 3
    assert_same(list(skipping), expected[3:])
    assert batches_given(skipping.base_dataloader) == STEPS - 3
    skipping.set_epoch(0)
    assert_same(list(skipping), expected[3:])
    plain = skip_first_batches(seeded(num_workers), 3)
    assert_same(list(plain), expected[3:])
    assert len(list(skip_first_batches(seeded(0), STEPS + 1))) == 0


def test_skipping_forgets_what_was_loaded(tmp_path: Path) -> None:
    """After `load_state` and `skip_first_batches`, as with stock loaders, the next epoch is complete."""
    _, shard = brought(generated(0))
    expected = [list(shard) for _ in range(2)]
    run_and_save(*brought(generated(0)), (0, 3), tmp_path)
    _, shard = resumed(generated(0), tmp_path, 0)
    assert_same(list(skip_first_batches(shard, 3)), expected[0][3:])
    assert_same(list(shard), expected[1])
