from __future__ import annotations

import warnings
from array import array
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.verification.runs import fields, token

_DENSE = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
with warnings.catch_warnings(action="ignore"):  # that these layouts are new in torch
    _ROWS = (_DENSE.to_sparse_csr(), _DENSE.T.to_sparse_csr())
    _NESTED = (torch.nested.nested_tensor([_DENSE]), torch.nested.nested_tensor([_DENSE, _DENSE]))
_COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
_LARGE = np.zeros(12 << 20, np.float32)  # 48 MiB, of which bytes are sampled
_LARGER = np.repeat(np.array([0, 1], np.float32), 6 << 20)


@dataclass(slots=True)
class Slotted:
    """A sample without a dictionary."""

    x: Any


class Image:
    """Pixels that numpy can read, and that are no attribute, as those of an image of PIL."""

    def __init__(self, value: int) -> None:
        self.read = np.full(4, value, np.uint8).view

    @property
    def __array_interface__(self) -> Any:
        return self.read().__array_interface__


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_COMPLEX.conj(), (2 * _COMPLEX).conj()),
        (_DENSE.to_sparse(), _DENSE.flip(1).to_sparse()),
        _ROWS,
        _NESTED,
        (_LARGE, _LARGER),
        ([*"a" * 2000], [*"a" * 1999, "b"]),
        ({str(number): 0 for number in range(100)}, {str(number): number // 99 for number in range(100)}),
        (Slotted(_DENSE), Slotted(_DENSE.T)),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
        (deque([1, 2], 3), deque([1, 3], 3)),
        (array("d", [1.0]), array("d", [2.0])),
        (Image(1), Image(2)),
    ],
    ids=[
        "conjugated",
        "sparse",
        "sparse rows",
        "nested",
        "large",
        "long list",
        "many parts",
        "slots",
        "time",
        "deque",
        "array",
        "image",
    ],
)
def test_parts_of_a_batch_that_differ(one: Any, other: Any) -> None:
    """Have other tokens, whatever their layout and however many they are; equal ones have the same."""
    assert fields({"x": one}) != fields({"x": other})
    assert fields({"x": one}) == fields({"x": one})


def test_a_conjugated_tensor_is_its_values() -> None:
    """A lazy conjugation, or negation, has the token of the tensor that it stands for."""
    assert token(_COMPLEX.conj()) == token(_COMPLEX.conj().resolve_conj())
    assert token(_COMPLEX.conj().imag) == token(_COMPLEX.conj().imag.resolve_neg())
