from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.workers.ipc.leaves import DTYPES, batch_nbytes, dense_view, has_code, torch_dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_view_of_memory_has_dtype_and_shape() -> None:
    """Memory can be written to as a tensor of any dtype, also of dtypes that numpy does not have."""
    for dtype in DTYPES:
        memory = mmap.mmap(-1, 4096)
        tensor = dense_view(memory, 64, dtype, (2, 3))
        assert (tensor.dtype, tensor.shape) == (dtype, (2, 3))
        tensor.view(torch.uint8).fill_(1)
        nbytes = 6 * dtype.itemsize
        assert memory[:4096] == bytes(64) + b"\1" * nbytes + bytes(4096 - 64 - nbytes)


def test_numpy_dtypes_with_the_same_bits_in_torch() -> None:
    """Native dtypes have their torch partner; others have None."""
    assert torch_dtype(np.dtype("f4")) is torch.float32
    assert torch_dtype(np.dtype("u2")) is torch.uint16
    assert torch_dtype(np.dtype("?")) is torch.bool
    for name in (">i4", "U3", "O", "M8[s]", "V4", "g"):
        assert torch_dtype(np.dtype(name)) is None


def test_dtypes_without_a_code_are_told() -> None:
    """A dtype that no leaf can have is known before a leaf is made of it."""
    assert has_code(torch.bfloat16)
    assert not has_code(torch.quint8)


# ------------------------------------------------------------------------------------------------- the bytes of a batch


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
