"""Requirements of frameworks on a DataLoader, point by point: changes between epochs, a batch's owner, replaced
classes.

Points 16 to 18, and loaders that a framework replaces; the other points are in `test_construction.py`,
`test_iteration.py` and `test_state.py`. Each test repeats the actions of the frameworks that its docstring names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Images, Numbers
from tests.helpers.frameworks import epoch
from tests.helpers.running import BOTH, collect, run_async

BOTH_CLASSES = pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])


# ------------------------------------------------------------------------------------------- 16


class Switched(Numbers):
    """Each sample is its index and a field of the dataset."""

    def __init__(self) -> None:
        super().__init__(6)
        self.field = 0

    def __getitem__(self, index: int) -> Any:
        return index, self.field


class Collate:
    """A `collate_fn` with a switch (timm's mixup)."""

    enabled = True

    def __call__(self, samples: list[Any]) -> Any:
        return self.enabled, samples


@BOTH_CLASSES
@pytest.mark.parametrize("workers", [0, 2])
def test_point_16_changes_are_seen_in_the_next_epoch(make: Any, workers: int) -> None:
    """Workers that do not persist get the dataset and the collation in their state at `iter()`."""
    dataset, collate = Switched(), Collate()
    loader = make(dataset, num_workers=workers, collate_fn=collate)
    assert {(on, field) for on, [(_, field)] in epoch(loader)} == {(True, 0)}
    collate.enabled, dataset.field = False, 5
    assert {(on, field) for on, [(_, field)] in epoch(loader)} == {(False, 5)}


# ------------------------------------------------------------------------------------------- 17


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("ring_bytes", [None, 4096 * 8])
def test_point_17_batches_belong_to_their_holder(kind: str, ring_bytes: int | None) -> None:
    """Up to twelve batches are held while the next are fetched (HF Trainer's accumulation): none of them changes, and
    the loader does not block.
    """
    expected = collect("torch", Images(96), batch_size=2)
    make: Any = AsyncDataLoader if kind == "asyncio" else DataLoader
    loader = make(Images(96), batch_size=2, num_workers=2, tuning=Tuning(ring_bytes=ring_bytes))
    held: list[Any] = []
    taken = 0

    def take(batch: Any) -> None:
        nonlocal taken
        taken += 1
        held.append(batch)
        if len(held) > 12:
            del held[:4]  # a step of four is over
        assert_same(held, expected[taken - len(held) : taken])

    if kind == "sync":
        for batch in loader:
            take(batch)
    else:

        async def run() -> None:
            async for batch in loader:
                take(batch)

        run_async(run())
    assert taken == 48


# ------------------------------------------------------------------------------------------- 18


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_point_18_batches_on_their_device_are_left_alone(kind: str, workers: int) -> None:
    """Tensors are plain CPU tensors: moving them to the CPU gives the same objects (`send_to_device`)."""
    for batch in collect(kind, Numbers(6), batch_size=2, num_workers=workers):
        assert type(batch) is torch.Tensor
        assert batch.device == torch.device("cpu")
        assert batch.to("cpu", non_blocking=True) is batch
        assert not batch.requires_grad


# ------------------------------------------------------------------------------------------- classes replaced


def framework(loader: Any) -> Any:
    """A stock loader made from the attributes of the user's loader, like those of Accelerate, Ray Train and others."""
    names = ["batch_sampler", "num_workers", "collate_fn", "generator"]
    return torch.utils.data.DataLoader(loader.dataset, **{name: getattr(loader, name) for name in names})
