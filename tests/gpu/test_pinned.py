"""`pin_memory=True` with a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from tests.gpu.card import NEEDS_CARD
from tests.helpers.datasets import Custom, Images, Numbers
from tests.helpers.running import KINDS, collect, run_loader

pytestmark = NEEDS_CARD


def custom(samples: list[Any]) -> Custom:
    return Custom(torch.stack(samples), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_pin_memory_with_cuda(kind: str, workers: int) -> None:
    """Every tensor of every batch is page-locked, equal to torch's, in order, over two epochs."""
    run = run_loader(kind, Images(40), epochs=2, num_workers=workers, batch_size=4, pin_memory=True)
    plain = run_loader("torch", Images(40), epochs=2, num_workers=workers, batch_size=4)
    for epoch, expected in zip(run.epochs, plain.epochs, strict=True):
        for batch, twin in zip(epoch, expected, strict=True):
            assert batch["image"].is_pinned()
            assert batch["pair"].left.is_pinned()
            assert torch.equal(batch["image"], twin["image"])
            assert batch["name"] == twin["name"]
    (first, *_) = collect(kind, Numbers(3), num_workers=workers, pin_memory=True, collate_fn=custom)
    assert first.pinned_by == "pin_memory"


def test_pinned_epoch_left_early() -> None:
    """Leaving epochs early while copies are in flight leaves no slot, thread or process behind."""
    with DataLoader[Any](Images(80), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True) as loader:
        for taken in (1, 5, 2, 9, 1, 1, 1, 1, 1, 1):
            got = [int(batch["label"][0]) for batch, _ in zip(loader, range(taken), strict=False)]
            assert got == [4 * i for i in range(taken)]
        assert len(list(loader)) == 20
