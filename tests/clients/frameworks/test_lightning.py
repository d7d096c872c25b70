from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset

from asyncloader import Tuning
from tests.clients.frameworks.helping import Rows, RowStream, batches_given, seed_all, workers_of_now
from tests.clients.frameworks.lightning_runs import OURS, STOCK, Recorder, SaveAt, WorkersSeen, fit, trainer
from tests.helpers.comparing import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice for machines with more CPUs
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),  # Lightning 2.6 under torch 2.13
]

# -------------------------------------------------------------------------------------------- fit


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["0", "2", "2 persistent"],
)
def test_fit_sees_torchs_batches(options: dict[str, Any]) -> None:
    """Three epochs give the batches, the weights and the generator states of a run with torch's loader."""
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": True, **options}
    expected, expected_draws = fit(STOCK(Rows(36), **arguments), max_epochs=3)
    loader = OURS(Rows(36), **arguments)
    got, got_draws = fit(loader, max_epochs=3)
    assert len(got.seen["train"]) == 15
    assert_same(got.seen["train"], expected.seen["train"])
    assert_same(got.line.state_dict(), expected.line.state_dict())
    assert got_draws == expected_draws
    assert batches_given(loader) == 15


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_no_process_is_left_after_fit(persistent: bool) -> None:
    """When `fit` returns, the workers have ended, although loader, model and trainer are still held."""
    seen = WorkersSeen()
    loader = OURS(Rows(64), 8, num_workers=2, persistent_workers=persistent)
    model, held = Recorder(), trainer(max_epochs=2, callbacks=[seen])
    held.fit(model, loader)
    with seen.at_first() as workers:
        assert len(workers.fds) == 2
        assert workers.ended()
    assert len(model.seen["train"]) == 16
    assert loader._iterator is None


def test_persistent_workers_last_over_the_epochs() -> None:
    """Over several epochs the same two processes work, and their number does not grow."""
    seen: list[set[int]] = []

    class Pids(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            with workers_of_now() as workers:
                seen.append(set(workers.fds))

    fit(OURS(Rows(16), 8, num_workers=2, persistent_workers=True), max_epochs=3, callbacks=[Pids()])
    assert len(seen) == 6
    assert len(seen[0]) == 2
    assert all(pids == seen[0] for pids in seen)


@pytest.mark.thorough
def test_fit_that_stops_within_an_epoch() -> None:
    """`limit_train_batches` and `max_steps` abandon iterators; the batches are torch's, and no worker stays."""
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    options: dict[str, Any] = {"max_epochs": 5, "max_steps": 7, "limit_train_batches": 3}
    expected, expected_draws = fit(STOCK(Rows(60), **arguments), **options)
    seen = WorkersSeen()
    got, got_draws = fit(OURS(Rows(60), **arguments), callbacks=[seen], **options)
    assert len(got.seen["train"]) == 7
    assert_same(got.seen["train"], expected.seen["train"])
    assert got_draws == expected_draws
    with seen.at_first() as workers:
        assert workers.ended()


def test_error_in_a_training_step() -> None:
    """An error of the model's ends `fit` with that error; the workers end, too."""
    loader = OURS(Rows(64), 8, num_workers=2, persistent_workers=True)

    class Failing(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                raise ZeroDivisionError("in the step")

    seen = WorkersSeen()
    with pytest.raises(ZeroDivisionError, match="in the step"):
        fit(loader, max_epochs=1, callbacks=[seen, Failing()])
    with seen.at_first() as workers:
        assert len(workers.fds) == 2
        loader.close()
        assert workers.ended()


def test_unsized_stream() -> None:
    """A stream without a length, which Lightning reads one batch ahead, gives torch's batches."""
    expected, expected_draws = fit(STOCK(RowStream(40), 8, num_workers=2), max_epochs=2)
    got, got_draws = fit(OURS(RowStream(40), 8, num_workers=2), max_epochs=2)
    assert len(got.seen["train"]) == 2 * 6
    assert_same(got.seen["train"], expected.seen["train"])
    assert got_draws == expected_draws


@pytest.mark.thorough
def test_several_loaders() -> None:
    """A dictionary of loaders gives a dictionary of batches; each loader's batches are torch's."""

    class Two(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen["train"].append(batch)
            loss: torch.Tensor = self.line(**batch["a"])["loss"] + self.line(**batch["b"])["loss"]
            return loss

    def run(make: Any) -> Two:
        seed_all()
        model = Two()
        loaders = {"a": make(Rows(24), 8, shuffle=True, num_workers=1), "b": make(Rows(12), 4, num_workers=1)}
        trainer(max_epochs=2).fit(model, loaders)
        return model

    expected, got = run(STOCK), run(OURS)
    assert len(got.seen["train"]) == 6
    assert_same(got.seen["train"], expected.seen["train"])


# -------------------------------------------------------------------------------------------- overfit


def test_overfit_batches_keeps_the_loader() -> None:
    """`overfit_batches` replaces the sampler and so builds a new loader: it is ours, with its own options."""
    dataset = Rows(40)
    loader = OURS(dataset, 8, shuffle=True, num_workers=2, tuning=Tuning(ring_bytes=1 << 20), snapshot_every_n_steps=3)
    model, run = Recorder(), trainer(max_epochs=2, overfit_batches=2)
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        run.fit(model, loader)
    used: Any = run.train_dataloader
    assert used is not loader
    assert type(used) is OURS
    assert (used.dataset, used.tuning.ring_bytes, used.snapshot_every_n_steps, used.num_workers) == (
        dataset,
        1 << 20,
        3,
        2,
    )
    assert batches_given(used) == 4
    assert [len(batch["x"]) for batch in model.seen["train"]] == [8] * 4


def test_dataset_changed_between_epochs() -> None:
    """Without persistent workers a change of the dataset in a hook shows in the next epoch."""

    class Level(Dataset[torch.Tensor]):
        level = 0.0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.full((3,), self.level), "labels": torch.zeros(1)}

    class Raise(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            dataset.level += 1

    dataset = Level()
    model, _ = fit(OURS(dataset, 8, num_workers=1), max_epochs=3, callbacks=[Raise()])
    assert [float(batch["x"].mean()) for batch in model.seen["train"]] == [0.0, 1.0, 2.0]


# -------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.thorough
def test_resume_after_an_epoch(tmp_path: Path) -> None:
    """From a checkpoint saved at an epoch's end, training goes on as it does with torch's loader."""
    runs = []
    for make in (STOCK, OURS):
        path = tmp_path / f"{make.__module__}.ckpt"
        seed_all()
        first = trainer(max_epochs=1)
        first.fit(Recorder(), make(Rows(40), 8, shuffle=True, num_workers=2))
        first.save_checkpoint(path)
        second, model = trainer(max_epochs=3), Recorder()
        second.fit(model, make(Rows(40), 8, shuffle=True, num_workers=2), ckpt_path=path, weights_only=True)
        assert (second.current_epoch, second.global_step) == (3, 15)
        runs.append((model.seen["train"], model.line.state_dict()))
    assert len(runs[1][0]) == 10
    assert_same(runs[1], runs[0])


def test_resume_within_an_epoch(tmp_path: Path) -> None:
    """From a checkpoint saved within an epoch, the batches are those of an uninterrupted run from there on. This
    needs no callback of ours. In torch mode, and in order: the loader does not restore the rows' random numbers
    there.
    """
    arguments: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "persistent_workers": True}
    dataset = [{"x": torch.full((3,), float(i)), "labels": torch.ones(1)} for i in range(40)]
    whole, _ = fit(OURS(dataset, **arguments), max_epochs=2, callbacks=[SaveAt(tmp_path, 3)])
    second, model = trainer(max_epochs=2), Recorder()
    second.fit(model, OURS(dataset, **arguments), ckpt_path=tmp_path / "3", weights_only=True)
    assert (second.global_step, second.current_epoch) == (10, 2)
    assert len(whole.seen["train"]) == 10
    assert_same(model.seen["train"], whole.seen["train"][3:])
