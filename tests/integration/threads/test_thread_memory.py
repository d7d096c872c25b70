"""Worker threads: how many batches and samples exist at a time. Counted, as objects: a process's size says less."""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.workers.ipc import inline_collate
from tests.helpers.running import PATIENCE_S

BATCHES, BATCH_SIZE = 16, 3

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Alive:
    """Counts objects that exist, and the most that ever did."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self.now = self.most = self.made = 0

    def add(self, thing: Any) -> Any:
        with self._changed:
            self.now, self.made = self.now + 1, self.made + 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
        weakref.finalize(thing, self._freed).atexit = False
        return thing

    def _freed(self) -> None:
        with self._changed:
            self.now -= 1

    def wait(self, made: int) -> None:
        """Until this number was made."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.made >= made, PATIENCE_S)


class Tensors(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"small": torch.tensor(index), "larger": torch.full((50_000,), float(index))}


def own_collate(samples: list[Any]) -> Any:
    """A user's function."""
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize("collate", [None, own_collate])
def test_batches_are_in_the_memory_of_the_process(collate: Any) -> None:
    """torch's functions make no file in /dev/shm for a batch that stays in this process, whoever calls them."""
    with DataLoader[Any](Tensors(), batch_size=3, num_workers=2, workers="threads", collate_fn=collate) as loader:
        batches = list(loader)
    assert [batch["larger"][:, 0].tolist() for batch in batches] == [batch["small"].tolist() for batch in batches]
    assert not any(leaf.is_shared() for batch in batches for leaf in batch.values())


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (4, 1)])
def test_no_more_batches_exist_than_were_asked_for(
    workers: int, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num_workers * prefetch_factor` batches, the consumer's and the one that it takes next; and of samples one batch
    of each worker. With one worker and prefetch_factor=1 that is one batch more than torch has without workers.
    """
    samples, batches, blocks = Alive(), Alive(), Alive()
    allocate = inline_collate._allocate

    def counted(nbytes: int) -> mmap.mmap:
        found: mmap.mmap = blocks.add(allocate(nbytes))
        return found

    monkeypatch.setattr(inline_collate, "_allocate", counted)
    monkeypatch.setattr(inline_collate, "LARGE", 1)  # every batch lies in a block that is used again

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

        def __getitem__(self, index: int) -> Any:
            return samples.add(torch.full((5000,), index))

    default = inline_collate.inline_collate()

    def collate(rows: Any) -> Any:
        return batches.add(default(rows))

    for before, function in enumerate([None, collate]):  # with blocks of the pool; with a function of the user's
        loader = DataLoader(
            Rows(), BATCH_SIZE, num_workers=workers, prefetch_factor=prefetch, workers="threads", collate_fn=function
        )
        for number, batch in enumerate(loader, 1):
            assert batch[:, 0].tolist() == [*range((number - 1) * BATCH_SIZE, number * BATCH_SIZE)]
            # A consumer that is as slow as can be: the workers have made all that they may.
            made = min(BATCHES, number + workers * prefetch)
            samples.wait((before * BATCHES + made) * BATCH_SIZE)
    assert blocks.most <= workers * prefetch + 2
    assert batches.most <= workers * prefetch + 2
    assert samples.most <= workers * BATCH_SIZE
