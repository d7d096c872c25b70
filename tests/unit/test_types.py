"""The types that type checkers see. They check this file; `assert_type` does nothing when it is run."""

from __future__ import annotations

from typing import Any, assert_type

from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, StatefulDataLoader


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def joined(samples: list[int]) -> str:
    return ",".join(map(str, samples))


def test_batches_are_what_collate_fn_returns() -> None:
    """This holds for every loader; without `collate_fn` batches are Any, as in torch."""
    loader = DataLoader(Squares(), batch_size=2, collate_fn=joined)
    assert_type(loader, DataLoader[int, str])
    for batch in loader:
        assert_type(batch, str)
    assert_type(next(iter(StatefulDataLoader(Squares(), collate_fn=joined))), str)
    for anything in DataLoader(Squares()):
        assert_type(anything, Any)
    assert list(loader) == ["0,1", "4,9"]


async def test_batches_of_async_for() -> None:
    """Batches have the type that `collate_fn` returns here, too."""
    batches = []
    async for batch in AsyncDataLoader(Squares(), batch_size=2, collate_fn=joined):
        assert_type(batch, str)
        batches.append(batch)
    assert batches == ["0,1", "4,9"]


def test_one_parameter_is_enough() -> None:
    """`DataLoader[int]` is torch's way to write it, in annotations and in base classes."""

    class Own(DataLoader[int]):
        pass

    def batches(loader: DataLoader[int]) -> int:
        assert_type(loader, DataLoader[int, Any])
        return len(loader)

    assert batches(Own(Squares())) == 4
