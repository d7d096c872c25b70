from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.integrations.tensorboard import log_stats
from tests.clients.frameworks.helping import Rows

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_statistics_are_scalars(tmp_path: Path) -> None:
    """TensorBoard's own reader finds each figure of `stats()` under its key, at its step."""
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    loader = DataLoader[Any](Rows(24), batch_size=8)
    try:
        for step in (3, 6):
            assert sum(1 for _ in loader) == 3
            log_stats(writer, loader, step, "train/")
    finally:
        writer.close()
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(tmp_path)
    )
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {f"train/{key}" for key in loader.stats()}
    batches = reader.Scalars("train/data/batches")
    assert [(each.step, each.value) for each in batches] == [(3, 3), (6, 6)]
