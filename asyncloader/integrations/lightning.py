"""Logs a loader's counters in Lightning, and corrects two positions that Lightning saves wrongly.

Lightning keeps a loader's class, saves and loads its state, and drops its iterators when a stage ends, so our loaders
work without this. The callback adds the counters of `DataLoader.stats` to the logged metrics, and corrects checkpoints
in the two cases in which Lightning saves another position than that from which it continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from asyncloader.loaders.loader import DataLoader


class LoaderCallback(Callback):
    """Logs the counters of the training loaders, under ``data/...``; of several, under ``loader_0/data/...`` and so on.

    In checkpoints it corrects the states of our training loaders. Without it a run that is resumed from a checkpoint of
    ``on_train_batch_end`` (as `ModelCheckpoint` with ``every_n_train_steps`` saves them) loses

    - the next epoch, if that batch was the last of its epoch: Lightning begins a new epoch with a loader that has
      reached the end of the old epoch (with `limit_train_batches` the new epoch gets the rest of the old epoch);
    - one batch of a loader without a length, of which Lightning reads one batch more than it trains on.

    Args:
        every_n_steps: training steps between two loggings, at least 1; None logs at the end of each epoch only
            (default).
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps should be at least 1 or None, but got every_n_steps={every_n_steps}")
        self._every = every_n_steps
        self._logged = 0  # the step of the last logging

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a run, perhaps a resumed one."""
        self._logged = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log every `every_n_steps`."""
        step = trainer.global_step  # batches of an accumulation do not advance it
        if self._every is not None and step % self._every == 0 and step != self._logged:
            self._logged = step
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log once per epoch, if `every_n_steps` is None."""
        if self._every is None:
            self._log(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Correct our loaders' states, after Lightning has put all states into the checkpoint."""
        saved: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
        states = saved.get("state_dict", {}).get("combined_loader")
        if not states:
            return
        progress = saved["epoch_loop.batch_progress"]
        ready, completed = progress["current"]["ready"], progress["current"]["completed"]
        last = progress["is_last_batch"] or ready == trainer.num_training_batches
        if last and completed == ready:
            return  # the epoch is over: Lightning resumes here and finds it exhausted, which is right
        fetcher: Any = trainer.fit_loop._data_fetcher
        # Whether Lightning has read a batch ahead. After `fit` no fetcher exists to tell, but the batch was read.
        ahead = (
            trainer.num_training_batches == float("inf") if fetcher is None else bool(getattr(fetcher, "batches", ()))
        )
        for number, loader in enumerate(filter(_is_stateful, _leaves(trainer.train_dataloader))):
            if not isinstance(loader, DataLoader):
                continue
            if last:
                states[number] = loader._asyncloader_state.keeper.state(loader, finished=True)
            elif ahead:
                states[number] = loader._asyncloader_state.keeper.state(loader, before_last=True)

    def _log(self, trainer: Trainer) -> None:
        ours = list(_ours(trainer.train_dataloader))
        for number, loader in enumerate(ours):
            stats = loader.stats()
            if len(ours) > 1:
                stats = {f"loader_{number}/{name}": value for name, value in stats.items()}
            for logger in trainer.loggers:
                logger.log_metrics(stats, trainer.global_step)


def _leaves(loaders: Any) -> list[Any]:
    """Return the loaders in the order of Lightning's states."""
    return list(CombinedLoader(loaders, "min_size").flattened)


def _ours(loaders: Any) -> Iterator[DataLoader[Any]]:
    for each in _leaves(loaders):
        if isinstance(each, DataLoader):
            yield each
        elif isinstance(each, CombinedLoader):
            yield from _ours(each.iterables)


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
