"""Writes a loader's statistics to TensorBoard, through the `SummaryWriter` that the program has."""

from __future__ import annotations

from typing import Any

from asyncloader.integrations.exported import Loader

__all__ = ["log_stats"]


def log_stats(writer: Any, loader: Loader, step: int, prefix: str = "", *, interval: bool = False) -> None:
    """Write the loader's `stats()` as scalars.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or another object with its `add_scalar`.
        loader: of asyncloader.
        step: number of the training step.
        prefix: put before every key, as ``"train/"``.
        interval: count only from the last call with ``interval=True`` on.
    """
    for key, value in loader.stats(prefix, interval=interval).items():
        writer.add_scalar(key, value, step)
