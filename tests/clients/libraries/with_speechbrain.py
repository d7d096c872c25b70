"""SpeechBrain: `make_dataloader`, shuffled and padded; and epochs that a `Checkpointer` resumes."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from speechbrain.dataio.dataloader import make_dataloader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.checkpoints import Checkpointer


def _signal(length: int) -> torch.Tensor:
    return torch.arange(float(length)) + torch.rand(length)


def _loader(workers: int) -> Any:
    rows = {f"row{n}": {"length": n} for n in range(3, 22)}
    dataset = DynamicItemDataset(rows, output_keys=["id", "signal"])
    dataset.add_dynamic_item(_signal, takes="length", provides="signal")
    return make_dataloader(dataset, batch_size=2, shuffle=True, num_workers=workers)


def _plain(batch: Any) -> dict[str, Any]:
    return {"id": list(batch.id), "signal": batch.signal.data, "lengths": batch.signal.lengths}


def batches(workers: int) -> dict[str, list[Any]]:
    """Read two epochs; a resumed epoch and the next; and both resumed from an epoch's end."""
    loader = _loader(workers)
    found: dict[str, list[Any]] = {"epochs": [_plain(batch) for _ in range(2) for batch in loader]}
    for name, taken in {"resumed": 3, "resumed at the end": 10}.items():
        with tempfile.TemporaryDirectory() as folder:
            loader = _loader(workers)
            iterator = iter(loader)
            for _ in range(taken):
                next(iterator)
            Checkpointer(folder, {"loader": loader}).save_checkpoint(end_of_epoch=False)
            resumed = _loader(workers)
            Checkpointer(folder, {"loader": resumed}).recover_if_possible()
            found[name] = [[_plain(batch) for batch in resumed] for _ in range(2)]
    return found
