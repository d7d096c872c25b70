"""timm: `create_loader` with random augmentation, plainly and with one iterator for all epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from tests.clients.libraries.gaps import fill_torchvision

fill_torchvision()

from timm.data import create_loader  # noqa: E402


class _Pictures(Dataset[Any]):
    """Twenty small pictures; timm sets the attribute to its transform."""

    transform: Any = None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        pixels = np.random.default_rng(index).integers(0, 255, (40, 36, 3), dtype=np.uint8)
        return self.transform(Image.fromarray(pixels)), index % 3


def batches(workers: int) -> dict[str, list[Any]]:
    """Read two epochs of each loader."""
    found = {}
    for name, multi_epochs in {"plain": False, "multi-epochs": True}.items():
        loader = create_loader(
            _Pictures(),
            input_size=(3, 24, 24),
            batch_size=6,
            is_training=True,
            use_prefetcher=False,
            num_workers=workers,
            pin_memory=False,
            auto_augment="rand-m5",
            use_multi_epochs_loader=multi_epochs,
        )
        found[name] = [batch for _ in range(2) for batch in loader]
    return found
