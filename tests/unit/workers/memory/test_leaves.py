from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from asyncloader.workers.memory.leaves import DTYPES, dense_view, has_code, torch_dtype


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
