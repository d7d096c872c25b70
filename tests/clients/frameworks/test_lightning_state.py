"""Runs that Lightning resumes from a checkpoint: the batches are the remaining batches of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import StatefulDataLoader
from asyncloader.integrations.lightning import LoaderCallback
from tests.clients.frameworks.helping import Rows, seed_all
from tests.clients.frameworks.lightning_runs import OURS, Recorder, SaveAt, Saver, Validated, trainer
from tests.helpers.comparing import assert_same, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice for machines with more CPUs
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),  # Lightning 2.6 under torch 2.13
]

ROWS, BATCH, STEPS, EPOCHS = 36, 8, 5, 3


def row(index: int) -> dict[str, torch.Tensor]:
    """A row that depends on nothing but its index."""
    return {"x": torch.full((3,), float(index)), "labels": torch.ones(1)}


class Plain(Dataset[Any]):
    """Rows without random numbers: in torch mode a resumed run does not repeat random numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row(index)


class Stream(IterableDataset[Any]):
    """Rows without a length, dealt out to the workers, with random numbers; the stream knows its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        mine = range(first, ROWS, step)
        while self.at < len(mine):
            self.at += 1
            yield row(mine[self.at - 1]) | {"labels": torch.rand(1)}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Order(Stream):
    """The rows of `Stream` without random numbers."""

    def __iter__(self) -> Iterator[Any]:
        return (item | {"labels": torch.ones(1)} for item in super().__iter__())


def seeded(num_workers: int) -> Any:
    return OURS(Rows(ROWS), BATCH, shuffle=True, seed=5, num_workers=num_workers)


def persistent(num_workers: int) -> Any:
    return OURS(Rows(ROWS), BATCH, shuffle=True, seed=5, num_workers=num_workers, persistent_workers=num_workers > 0)


def generated(num_workers: int) -> Any:
    # Another seed each time: a resumed run's seed comes from the state.
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return OURS(Plain(), BATCH, shuffle=True, generator=generator, num_workers=num_workers)


def stateful(num_workers: int) -> Any:
    return StatefulDataLoader(Plain(), BATCH, shuffle=True, num_workers=num_workers)


def stream(num_workers: int) -> Any:
    return OURS(Order(), BATCH, num_workers=num_workers)


def run(loaders: Any, callbacks: list[Any], *, path: Path | None = None, val: Any = None, **options: Any) -> list[Any]:
    """Train a new model. Returns the batches that it saw."""
    model = Recorder() if val is None else Validated()
    trainer(**{"max_epochs": EPOCHS} | options, callbacks=callbacks).fit(
        model, loaders, val, ckpt_path=path, weights_only=True
    )
    return model.seen["train"]


def whole_and_resumed(make: Any, saver: Saver, **options: Any) -> tuple[list[Any], dict[int, list[Any]]]:
    """Return the batches of an uninterrupted run, and of each run resumed from a checkpoint of it."""
    seed_all(3)
    whole = run(make(), [LoaderCallback(), saver], **options)
    got = {}
    for step in saver.steps:
        seed_all(step + 50)
        got[step] = run(make(), [LoaderCallback()], path=saver.folder / str(step), **options)
    return whole, got


# ------------------------------------------------------------------------------------------- loaders with a length


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [seeded, generated, stateful])
def test_checkpoints_within_an_epoch_and_on_its_last_batch(make: Any, num_workers: int, tmp_path: Path) -> None:
    """From wherever ``on_train_batch_end`` saved, training continues with the next batch, to the end of the last
    epoch. In seeded mode random numbers are the same, too. Step 5 is the last of its epoch, where Lightning alone
    loses an epoch.
    """
    saver = SaveAt(tmp_path, 2, STEPS, STEPS + 3)
    whole, got = whole_and_resumed(lambda: make(num_workers), saver)
    assert len(whole) == EPOCHS * STEPS
    assert not same(whole[:STEPS], whole[STEPS : 2 * STEPS])
    for step, batches in got.items():
        assert_same(batches, whole[step:], f"from step {step}")


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [seeded, stateful])
def test_limited_epochs(make: Any, num_workers: int, tmp_path: Path) -> None:
    """With `limit_train_batches` an epoch ends before the loader's: the rest of the loader's epoch is not delivered
    later.
    """
    saver = SaveAt(tmp_path, 2, 3, 4)
    whole, got = whole_and_resumed(lambda: make(num_workers), saver, limit_train_batches=3)
    assert len(whole) == EPOCHS * 3
    for step, batches in got.items():
        assert_same(batches, whole[step:], f"from step {step}")


class SaveAfterEpoch(Saver):
    """Saves at the end of epochs."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_if_due(trainer)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_checkpoints_at_an_epochs_end(num_workers: int, tmp_path: Path) -> None:
    """Lightning loads no loader's state then: in seeded mode the epoch's number, which it does set, is enough."""
    saver = SaveAfterEpoch(tmp_path, STEPS, 2 * STEPS)
    whole, got = whole_and_resumed(lambda: seeded(num_workers), saver)
    for step, batches in got.items():
        assert_same(batches, whole[step:], f"from step {step}")


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_checkpoints_at_an_epochs_end_with_max_steps(num_workers: int, tmp_path: Path) -> None:
    """With `max_steps` Lightning does load the state, and enters the old epoch again: it is at its end, and nothing
    is drawn. This is torch mode. Lightning counts that epoch a second time, so in seeded mode the order is that of
    the next number.
    """
    saver = SaveAfterEpoch(tmp_path, STEPS)
    whole, got = whole_and_resumed(lambda: stateful(num_workers), saver, max_epochs=-1, max_steps=12)
    assert len(whole) == 12
    assert_same(got[STEPS], whole[STEPS:])


class SaveAfterValidation(Saver):
    """Saves when a validation within an epoch ends: the batch before it then counts as completed."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_if_due(trainer)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [seeded, stream])
def test_checkpoints_of_a_validation_within_an_epoch(make: Any, tmp_path: Path) -> None:
    """From a checkpoint saved when a validation within an epoch ends, the rest of that epoch follows."""
    saver = SaveAfterValidation(tmp_path, 2)
    val = OURS(Plain(), BATCH)
    options: dict[str, Any] = {"val": val, "val_check_interval": 2, "num_sanity_val_steps": 0}
    whole, got = whole_and_resumed(lambda: make(2), saver, **options)
    assert_same(got[2], whole[2:])


# ---------------------------------------------------------------------------------------- loaders without a length


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("own", [{}, {"seed": 4}], ids=["torch", "seeded"])
def test_streams(own: dict[str, Any], num_workers: int, tmp_path: Path) -> None:
    """Lightning reads a stream one batch ahead: that batch was not trained on, and is delivered again."""
    saver = SaveAt(tmp_path, 1, 3, 5, 7)

    def make() -> Any:
        return OURS(Order(), BATCH, num_workers=num_workers, **own)

    whole, got = whole_and_resumed(make, saver)
    assert len(whole) == EPOCHS * (5 if num_workers == 0 else 6)
    for step, batches in got.items():
        assert_same(batches, whole[step:], f"from step {step}")


def test_checkpoint_after_fit(tmp_path: Path) -> None:
    """A checkpoint that is saved after `fit` has returned within an epoch is right, too: the rest of the epoch
    follows. Lightning takes that epoch for done and sets the number of the next, but expects the rest of its
    batches.
    """
    for make in (stream, seeded):
        whole = run(make(0), [LoaderCallback()], max_epochs=-1, max_steps=9)
        first = trainer(max_epochs=-1, max_steps=3, callbacks=[LoaderCallback()])
        first.fit(Recorder(), make(0))
        first.save_checkpoint(tmp_path / make.__name__)
        got = run(make(0), [LoaderCallback()], path=tmp_path / make.__name__, max_epochs=-1, max_steps=9)
        assert len(got) == 6
        assert_same(got[: STEPS - 3], whole[3:STEPS], make.__name__)


def test_two_loaders_one_without_a_length(tmp_path: Path) -> None:
    """Beside a stream Lightning reads the other loader one batch ahead, too."""

    class Two(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen["train"].append(batch)
            loss: torch.Tensor = self.line(**batch["map"])["loss"]
            return loss

    def fit(callbacks: list[Any], path: Path | None = None) -> list[Any]:
        model = Two()
        loaders = {"stream": stream(0), "list": [1, 1], "map": seeded(2)}
        trainer(max_epochs=2, callbacks=callbacks).fit(model, loaders, ckpt_path=path, weights_only=True)
        return model.seen["train"]

    whole = fit([LoaderCallback(), SaveAt(tmp_path, 3)])
    got = fit([LoaderCallback()], tmp_path / "3")
    for name in ("stream", "map"):
        assert_same([batch[name] for batch in got], [batch[name] for batch in whole[3:]], name)
