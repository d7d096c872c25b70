"""The work that an epoch without workers does for a batch besides fetching it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from asyncloader.epoch.inline import _batch_nbytes
from tests.helpers.running import collect

ROW = torch.zeros(3)  # 12 bytes


class Reads(dict[str, Any]):
    """A dict whose `values` must not be called."""

    def values(self) -> Any:
        raise AssertionError("code of the user's")


@pytest.mark.parametrize(
    ("batch", "nbytes"),
    [
        (ROW, 12),
        ([ROW] * 100, 1200),
        (tuple({"row": ROW, "label": 1} for _ in range(100)), 1200),
        ({**dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 1), "row": ROW}, 12),
        ((tuple(range(100)), (ROW,) * 100), 1200),
        ([ROW, "text", None] * 10, 120),
        (Reads(row=ROW), 12),
        ("text", 0),
    ],
)
def test_bytes_are_those_of_the_tensors(batch: Any, nbytes: int) -> None:
    """Tensors in plain containers are found, however many there are, without calling the user's code."""
    assert _batch_nbytes(batch) == nbytes


def test_token_ids_are_not_read_to_their_end() -> None:
    """Neither the ids of a sequence nor the sequences are all read: their number costs nothing."""
    ids: list[Any] = [*range(500), ROW]
    assert _batch_nbytes([ids] * 500) == 0
    assert _batch_nbytes([*[[1]] * 500, ROW]) == 0


def test_containers_within_themselves() -> None:
    """Each container is visited once, and deep nesting raises no RecursionError."""
    batch: list[Any] = [ROW]
    batch += [batch, {"batch": batch, "row": ROW}]
    assert _batch_nbytes(batch) == 24
    deep: tuple[Any, ...] = (ROW,)
    for _ in range(10 * sys.getrecursionlimit()):
        deep = (1, deep)
    assert _batch_nbytes(deep) == 0


def within_itself(samples: list[torch.Tensor]) -> list[Any]:
    """Collates to a batch that refers to itself."""
    batch: list[Any] = [torch.stack(samples)]
    batch.append(batch)
    return batch


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_batch_within_itself_is_delivered(kind: str) -> None:
    """A batch that refers to itself is delivered, as by torch's loader."""
    batches = collect(kind, torch.zeros(4, 2), batch_size=2, collate_fn=within_itself)
    assert [(batch[0].shape, batch[1] is batch) for batch in batches] == [((2, 2), True)] * 2
