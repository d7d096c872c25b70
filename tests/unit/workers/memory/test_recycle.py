"""Private memory that is used again once its last view has died."""

from __future__ import annotations

import gc

import torch

from asyncloader.workers.memory import inline_collate
from asyncloader.workers.memory.inline_collate import Recycler


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_piece_comes_back_when_its_last_view_dies() -> None:
    """A slice keeps the block in use; once the slice is freed the same memory is used again."""
    recycler = Recycler()
    first = torch.frombuffer(recycler.take(8192), dtype=torch.uint8)
    place, view = address(first), first[10:20]
    del first
    second = torch.frombuffer(recycler.take(8192), dtype=torch.uint8)
    assert address(second) != place
    del view
    third = torch.frombuffer(recycler.take(8192), dtype=torch.uint8)
    assert address(third) == place
    assert address(second) != place


def test_pieces_of_another_size_are_not_kept_for_long() -> None:
    """Batches that grow do not leave their smaller predecessors behind."""
    recycler = Recycler()
    for pages in range(1, 20):
        recycler.take(4096 * pages)
    assert len(recycler._free) <= inline_collate._KEPT
    assert len(recycler._leases) <= 1


def test_views_outlive_their_recycler() -> None:
    """A batch that the consumer keeps stays valid after the loader was freed."""
    recycler = Recycler()
    kept = torch.frombuffer(recycler.take(4096), dtype=torch.uint8)
    kept.fill_(7)
    del recycler
    gc.collect()
    assert int(kept.sum()) == 7 * 4096
