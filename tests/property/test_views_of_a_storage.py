"""Views of one storage are encoded with the bytes seen through them, and overlap afterwards where they did before."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.workers.ipc.codec import Encoder
from tests.drawn import scaled
from tests.helpers.comparing import assert_same
from tests.unit.workers.ipc.through_memory import copied, view

BASE = torch.arange(1 << 16, dtype=torch.int32)
STEPS = st.sampled_from([0, 1, 1, 2, 3, 7, 64, 1000, 4096, 16384])


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Draw any view of the base."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    stride = [draw(STEPS) for _ in shape]
    reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    dtype = draw(st.sampled_from([torch.int32, torch.int32, torch.uint8, torch.complex64]))
    room = BASE.view(dtype).numel() - reach - 1
    if room < 0:
        shape, room = [1] * len(shape), BASE.view(dtype).numel() - 1
    first = draw(st.sampled_from([0, 1, 5, 64, 1001, 4097])) if draw(st.booleans()) else draw(st.integers(0, room))
    return BASE.view(dtype).as_strided(shape, stride, min(first, room))


def distinct(tensor: torch.Tensor) -> int:
    """Return the number of bytes of the elements, without repeated elements."""
    return int(np.prod([n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step])) * tensor.itemsize


def array(tensor: torch.Tensor) -> Any:
    """Return the same memory as a numpy array."""
    return tensor.numpy()


@settings(max_examples=scaled(300), deadline=None)
@given(st.lists(views(), min_size=1, max_size=5))
def test_views(values: list[torch.Tensor]) -> None:
    """Values, strides where there is room for them, and overlaps are kept; gaps between the views take no bytes."""
    encoded = Encoder().encode(values)
    for got in (view(encoded), copied(encoded)):
        assert_same(got, values)
        for (a, b), (x, y) in zip(combinations(values, 2), combinations(got, 2), strict=True):
            if np.shares_memory(array(a), array(b)):
                assert np.shares_memory(array(x), array(y))
                same = (a.dtype, a.shape, a.stride(), a.data_ptr()) == (b.dtype, b.shape, b.stride(), b.data_ptr())
                assert x.data_ptr() - y.data_ptr() == (0 if same else a.data_ptr() - b.data_ptr())
            else:
                assert not np.shares_memory(array(x), array(y))
        if len(values) == 1 and _injective(values[0]):
            assert encoded.nbytes <= max(4096, 4 * distinct(values[0])) + 64


def _injective(tensor: torch.Tensor) -> bool:
    """Whether no two elements overlap, except in repeated dimensions."""
    reach = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step and n > 1:
            if step < reach:
                return False
            reach += (n - 1) * step
    return True
