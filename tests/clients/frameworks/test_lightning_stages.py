from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers.logger import Logger

from asyncloader import Tuning
from asyncloader.integrations.lightning import LoaderCallback
from tests.clients.frameworks.helping import Rows, batches_given, seed_all
from tests.clients.frameworks.lightning_runs import OURS, STOCK, Recorder, Validated, fit, trainer
from tests.helpers.comparing import assert_same
from tests.helpers.running import run_script

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice for machines with more CPUs
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),  # Lightning 2.6 under torch 2.13
]

# -------------------------------------------------------------------------------------------- other stages


@pytest.mark.thorough
def test_fit_with_validation() -> None:
    """Validation between epochs, and the sanity check that abandons an iterator first, see torch's batches."""
    arguments: dict[str, Any] = {"batch_size": 8, "num_workers": 2}
    runs = []
    for make in (STOCK, OURS):
        val = make(Rows(40), persistent_workers=True, **arguments)
        runs.append(fit(make(Rows(32), shuffle=True, **arguments), val=val, max_epochs=2, num_sanity_val_steps=2))
    (expected, expected_draws), (got, got_draws) = runs
    assert len(got.seen["validate"]) == 2 + 2 * 5
    assert_same(dict(got.seen), dict(expected.seen))
    assert got_draws == expected_draws


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_other_stages_see_torchs_batches(stage: str) -> None:
    """`validate` and `test` use the given loader; their batches are torch's."""
    loader: Any = None
    seen = []
    for make in (STOCK, OURS):
        seed_all()
        model, loader = Validated(), make(Rows(36), 8, num_workers=2)
        getattr(trainer(), stage)(model, loader, verbose=False)
        seen.append(model.seen[stage])
    assert len(seen[1]) == 5
    assert_same(seen[1], seen[0])
    assert batches_given(loader) == 5


def test_predict_makes_the_loader_anew_with_its_own_options() -> None:
    """`predict` needs a batch sampler of its own: the new loader is of our class and keeps all options."""
    dataset = Rows(20)
    loader = OURS(
        dataset, 8, num_workers=2, prefetch_factor=3, tuning=Tuning(ring_bytes=1 << 20), snapshot_every_n_steps=3
    )
    run = trainer()
    predictions: Any = run.predict(Recorder(), loader)
    used: Any = run.predict_dataloaders
    assert used is not loader
    assert type(used) is OURS
    assert (used.dataset, used.tuning.ring_bytes, used.snapshot_every_n_steps) == (dataset, 1 << 20, 3)
    assert (used.num_workers, used.prefetch_factor) == (2, 3)
    assert [len(p) for p in predictions] == [8, 8, 4]
    assert batches_given(used) == 3


class Module(LightningDataModule):
    """Makes its loaders in hooks, where Lightning watches the constructors of all loader classes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make(Rows(24), 8, True, num_workers=2)

    def predict_dataloader(self) -> Any:
        loader = self.make(Rows(24), batch_size=8, num_workers=2)
        if isinstance(loader, OURS):
            loader = loader.clone(ring_bytes=1 << 20, snapshot_every_n_steps=5)
        return loader


def test_loaders_of_a_data_module() -> None:
    """Loaders made in a module's hooks train, and `predict` builds new loaders from the recorded arguments."""
    run: Any = None
    runs = []
    for make in (STOCK, OURS):
        seed_all()
        model, module, run = Recorder(), Module(make), trainer(max_epochs=1)
        run.fit(model, module)
        predictions = run.predict(model, module)
        runs.append((dict(model.seen), predictions))
    assert_same(runs[1], runs[0])
    used: Any = run.predict_dataloaders
    assert type(used) is OURS
    assert (used.tuning.ring_bytes, used.snapshot_every_n_steps) == (1 << 20, 5)


# -------------------------------------------------------------------------------------------- metrics, Fabric


class Kept(Logger):
    """A logger that keeps the metrics that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def of_loader(self) -> list[tuple[int | None, dict[str, float]]]:
        return [(step, line) for step, line in self.lines if any("data/" in name for name in line)]


def test_callback_logs_each_epoch() -> None:
    """By default the loader's counters are logged at each epoch's end, beside the other metrics."""
    kept, loader = Kept(), OURS(Rows(24), 8, num_workers=2)
    fit(loader, max_epochs=2, logger=kept, callbacks=[LoaderCallback()])
    (first, one), (second, two) = kept.of_loader()
    assert (first, second) == (3, 6)
    assert (one["data/batches"], two["data/batches"]) == (3, 6)
    assert two["data/samples"] == 48
    assert set(two) == set(loader.stats())


def test_callback_logs_every_so_many_steps() -> None:
    """With `every_n_steps` the counters are logged at the steps that it divides, and only there."""
    kept = Kept()
    fit(OURS(Rows(24), 8, num_workers=1), max_epochs=3, logger=kept, callbacks=[LoaderCallback(every_n_steps=4)])
    assert [step for step, _ in kept.of_loader()] == [4, 8]


def test_callback_logs_a_step_once() -> None:
    """Batches whose gradients are only accumulated are no steps; a second run logs its own steps again."""
    callback = LoaderCallback(every_n_steps=3)
    for _ in range(2):
        kept = Kept()
        loader = OURS(Rows(24), 4)
        fit(loader, max_epochs=1, logger=kept, callbacks=[callback], accumulate_grad_batches=2)
        assert [step for step, _ in kept.of_loader()] == [3]


def test_callback_tells_loaders_apart() -> None:
    """Each of several loaders has its number; stock loaders among them have none and are not logged."""
    kept = Kept()

    class Three(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self._loss("train", batch[2])

    loaders = [OURS(Rows(16), 8), STOCK(Rows(16), 8), OURS(Rows(8), 4)]
    trainer(max_epochs=1, logger=kept, callbacks=[LoaderCallback()]).fit(Three(), loaders)
    assert {step for step, _ in kept.of_loader()} == {2}
    values = {name: value for _, line in kept.of_loader() for name, value in line.items()}
    assert values["loader_0/data/samples"] == 16
    assert values["loader_1/data/samples"] == 8
    assert {name.partition("/")[0] for name in values} == {"loader_0", "loader_1"}


def test_callback_refuses_a_step_of_zero() -> None:
    """`every_n_steps` is at least 1."""
    with pytest.raises(ValueError, match="every_n_steps should be at least 1 or None, but got every_n_steps=0"):
        LoaderCallback(every_n_steps=0)


def test_fabric_iterates_our_loader() -> None:
    """Fabric wraps the loader and iterates it: torch's batches from our workers."""
    loader: Any = None
    epochs = []
    for make in (STOCK, OURS):
        seed_all()
        loader = make(Rows(24), 8, shuffle=True, num_workers=2)
        wrapped = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
        epochs.append([list(wrapped) for _ in range(2)])
    assert_same(epochs[1], epochs[0])
    assert batches_given(loader) == 6


# -------------------------------------------------------------------------------------------- several processes


@pytest.mark.thorough
def test_two_processes_share_the_dataset_out(tmp_path: Path) -> None:
    """On two devices Lightning builds a new loader with a `DistributedSampler`: it is ours, with its own options."""
    done = run_script(
        tmp_path,
        """
        import warnings
        import torch

        warnings.simplefilter("ignore")  # Lightning advises on much when it is imported and set up
        from lightning.pytorch import LightningModule, Trainer
        from asyncloader import DataLoader, Tuning

        class Model(LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
                self.rows = []

            def training_step(self, batch, batch_idx):
                self.rows += batch.flatten().tolist()
                return self.layer(batch).sum()

            def on_train_epoch_end(self):
                rows = self.all_gather(torch.tensor(self.rows)).flatten().tolist()
                assert sorted(rows) == list(range(16)), rows
                loader = self.trainer.train_dataloader
                assert type(loader) is DataLoader
                assert (loader.tuning.ring_bytes, loader.snapshot_every_n_steps, loader.num_workers) == (1 << 20, 3, 1)
                assert type(loader.sampler).__name__ == "DistributedSampler"
                assert loader.stats()["data/batches"] == 2
                if self.global_rank == 0:
                    print(f"{self.trainer.world_size} ranks", flush=True)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        if __name__ == "__main__":
            data = torch.arange(16.0).reshape(16, 1)
            own = {"tuning": Tuning(ring_bytes=1 << 20), "snapshot_every_n_steps": 3}
            loader = DataLoader(data, 4, shuffle=True, num_workers=1, **own)
            trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
            trainer.fit(Model(), loader)
            print("done")
        """,
    )
    assert done.stdout.split("\n") == ["2 ranks", "done", ""], done.stderr
