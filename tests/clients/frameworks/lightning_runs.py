"""Runs Lightning's trainer over a loader, and records the batches that the model sees."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import asyncloader
from tests.clients.frameworks.helping import Line, draws, seed_all, workers_of_now
from tests.helpers.running import Deaths

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader


class Recorder(LightningModule):
    """A model that keeps every batch that it was given, unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.seen: dict[str, list[Any]] = defaultdict(list)

    def _loss(self, stage: str, batch: Any) -> torch.Tensor:
        self.seen[stage].append(batch)
        loss: torch.Tensor = self.line(**batch)["loss"]
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss("train", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Lightning's hook for its test stage."""
        self._loss("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["predict"].append(batch)
        logits: torch.Tensor = self.line(**batch)["logits"]
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Validated(Recorder):
    """A `Recorder` with a validation step, which Lightning accepts only together with validation data."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss("validate", batch)


def trainer(**options: Any) -> Trainer:
    """Return a trainer that writes nothing."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return Trainer(**quiet | options)


def fit(loader: Any, *, val: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Recorder, Any]:
    """Train a new model from given seeds. Returns the model, and draws of the generators afterwards."""
    seed_all()
    model = Recorder() if val is None else Validated()
    trainer(**options).fit(model, loader, val, ckpt_path=ckpt_path)
    return model, draws()


class Saver(Callback):
    """Saves checkpoints after the given steps, each under its number, when one of its hooks calls `save_if_due`."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder = folder
        self.steps = steps

    def save_if_due(self, trainer: Trainer) -> None:
        """Save the checkpoint of a step, once."""
        path = self.folder / str(trainer.global_step)
        if trainer.global_step in self.steps and not path.exists():
            trainer.save_checkpoint(path)


class SaveAt(Saver):
    """Saves right after the step."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.save_if_due(trainer)


class WorkersSeen(Callback):
    """Records the processes that exist when the first training batch arrives."""

    def __init__(self) -> None:
        self.workers: Deaths | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.workers is None:
            self.workers = workers_of_now()

    def at_first(self) -> Deaths:
        assert self.workers is not None
        return self.workers
