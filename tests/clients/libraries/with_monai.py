"""MONAI: its `DataLoader` over random transforms, and `ThreadDataLoader`, with worker processes and worker threads."""

from __future__ import annotations

from typing import Any

import torch
from monai.data import CacheDataset, DataLoader, ThreadDataLoader
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, ScaleIntensityd

ROWS = [{"image": torch.arange(12.0).reshape(1, 3, 4) + n, "label": n} for n in range(14)]


def batches(workers: int) -> dict[str, list[Any]]:
    """Read two epochs of each loader."""
    random = Compose(
        [ScaleIntensityd(keys="image"), RandFlipd(keys="image", prob=0.5), RandGaussianNoised(keys="image", prob=0.7)]
    )
    found = {}
    for name, kind in {"plain": DataLoader, "buffered": ThreadDataLoader}.items():
        cached = CacheDataset(ROWS, random, progress=False, num_workers=None)
        found[name] = _two_epochs(kind(cached, batch_size=4, shuffle=True, num_workers=workers))
    return found


def batches_of_threads(workers: int) -> dict[str, list[Any]]:
    """The loader has a generator of its own for the order: the threads of torch's workers seed the process's."""
    cached = CacheDataset(ROWS, ScaleIntensityd(keys="image"), progress=False, num_workers=None)
    order = torch.Generator().manual_seed(5)
    loader = ThreadDataLoader(
        cached, batch_size=4, shuffle=True, generator=order, num_workers=workers, use_thread_workers=True
    )
    return {"threads": _two_epochs(loader)}


def _two_epochs(loader: Any) -> list[Any]:
    return [{name: torch.as_tensor(value) for name, value in batch.items()} for _ in range(2) for batch in loader]
