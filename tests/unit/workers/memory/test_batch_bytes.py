"""The bytes of a batch are those of its tensors, counted in bounded time."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from asyncloader.workers.memory.leaves import batch_nbytes

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
    assert batch_nbytes(batch) == nbytes


def test_token_ids_are_not_read_to_their_end() -> None:
    """Neither the ids of a sequence nor the sequences are all read: their number costs nothing."""
    ids: list[Any] = [*range(500), ROW]
    assert batch_nbytes([ids] * 500) == 0
    assert batch_nbytes([*[[1]] * 500, ROW]) == 0


def test_containers_within_themselves() -> None:
    """Each container is visited once, and deep nesting raises no RecursionError."""
    batch: list[Any] = [ROW]
    batch += [batch, {"batch": batch, "row": ROW}]
    assert batch_nbytes(batch) == 24
    deep: tuple[Any, ...] = (ROW,)
    for _ in range(10 * sys.getrecursionlimit()):
        deep = (1, deep)
    assert batch_nbytes(deep) == 0
