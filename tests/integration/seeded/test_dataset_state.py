"""A map dataset with a state of its own, in seeded mode: saved and restored where a single copy reads one sample after
the other, refused where it is unknown which samples a copy has read.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, Subset

from asyncloader import AsyncDataLoader, DataLoader, StateError

BOTH = pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])


class Counting(Dataset[int]):
    """Each sample has the number of samples this copy has given. With a path, a worker dies once, at its seventh."""

    def __init__(self, path: Path | None = None) -> None:
        self.given = 0
        self.path = path

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        self.given += 1
        if self.path is not None and self.given == 7 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 100 * self.given + index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Awaited(Counting):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


def options(**changes: Any) -> dict[str, Any]:
    return {"batch_size": 2, "shuffle": True, "seed": 5, **changes}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("step", [0, 3, 8])
async def test_a_state_has_the_datasets(workers: int, step: int) -> None:
    """The state of either class of loader is loaded by the other, in an epoch and at its end."""
    with DataLoader(Counting(), **options(num_workers=workers)) as loader:
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.tolist() for batch in batches]
    async with AsyncDataLoader(Counting(), **options(num_workers=workers)) as other:
        other.load_state_dict(state)
        assert [batch.tolist() async for batch in other] == (rest if step < 8 else [])


@BOTH
@pytest.mark.parametrize(
    ("dataset", "changes", "reason"),
    [
        (Counting, {"num_workers": 2}, "which of its 2 workers"),
        (Counting, {"concurrency": 2}, "several of its samples"),
        (Awaited, {}, "several of its samples"),
    ],
)
async def test_what_nobody_can_say_is_refused(make: Any, dataset: Any, changes: dict[str, Any], reason: str) -> None:
    """A state is refused in an epoch, and allowed before it; a Subset, which hides the dataset's state, allows it."""
    loader = make(dataset(), **options(**changes))
    loader.state_dict()
    batches = aiter(loader) if make is AsyncDataLoader else iter(loader)
    assert len(await anext(batches) if make is AsyncDataLoader else next(batches)) == 2
    with pytest.raises(StateError, match=f"{reason}.*Subset"):
        loader.state_dict()
    loader.close()
    plain: Any
    with make(Subset(dataset(), range(16)), **options(**changes)) as plain:
        found = aiter(plain) if make is AsyncDataLoader else iter(plain)
        assert len(await anext(found) if make is AsyncDataLoader else next(found)) == 2
        assert plain.state_dict()["step"] == 1


def test_between_epochs_new_workers_begin_as_the_dataset_is() -> None:
    """A state between epochs is not refused."""
    with DataLoader(Counting(), **options(num_workers=2)) as loader:
        list(loader)
        assert loader.state_dict()["finished"]


def test_a_replacement_goes_on_behind_the_last_answer(tmp_path: Path) -> None:
    """A worker that died is replaced by a worker whose dataset has the state after the last answer."""
    with DataLoader(Counting(), **options(num_workers=1)) as loader:
        expected = [batch.tolist() for batch in loader]
    with DataLoader(Counting(tmp_path / "died"), **options(num_workers=1)) as loader:
        assert [batch.tolist() for batch in loader] == expected
        assert loader.stats()["data/worker_restarts"] == 1
