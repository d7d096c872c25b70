"""Generates samples of many structures, and batches of them, for tests of collation."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st


class Point(NamedTuple):
    x: Any
    y: Any


TORCH_DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
NUMPY_DTYPES = ["f4", "f8", "i8", "u1", "?", "i2", "u2", "c8"]
SHAPES = [(), (1,), (3,), (2, 2), (0,), (2, 0)]

small = st.integers(-(2**31), 2**31)
floats = st.floats(allow_nan=False, width=32)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))) + seed).to(dtype).view(shape)


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    return (np.arange(int(np.prod(shape))) + seed).astype(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn, count: int) -> list[Any]:
    """Tensors mostly alike; now and then one has another shape or dtype, which torch promotes or refuses."""
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(st.sampled_from(SHAPES))
    out = [_tensor(dtype, shape, n) for n in range(count)]
    if draw(st.integers(0, 5)) == 0:
        odd = _tensor(draw(st.sampled_from(TORCH_DTYPES)), draw(st.sampled_from([*SHAPES, shape, shape])), 9)
        out[draw(st.integers(0, count - 1))] = odd
    if draw(st.booleans()) and len(shape) == 2:
        out = [t.t() for t in out]
    return out


@st.composite
def arrays(draw: st.DrawFn, count: int) -> list[Any]:
    """Arrays mostly alike; now and then one has another shape or dtype, or is a tensor."""
    dtype, shape = draw(st.sampled_from(NUMPY_DTYPES)), draw(st.sampled_from(SHAPES))
    out = [_array(dtype, shape, n) for n in range(count)]
    if draw(st.integers(0, 5)) == 0:
        odd = _array(draw(st.sampled_from(NUMPY_DTYPES)), draw(st.sampled_from([*SHAPES, shape, shape])), 9)
        out[draw(st.integers(0, count - 1))] = odd
    if draw(st.booleans()):
        out = [np.asfortranarray(a) for a in out]
    return out


@st.composite
def numbers(draw: st.DrawFn, count: int) -> list[Any]:
    """Python's and numpy's numbers, of one kind or mixed."""
    kinds: list[st.SearchStrategy[Any]] = [
        st.booleans(),
        small,
        floats,
        st.integers(2**62, 2**65),
        small.map(np.int64),
        floats.map(np.float32),
        floats.map(np.float64),
        st.booleans().map(np.bool_),
    ]
    kind = draw(st.sampled_from(kinds))
    if draw(st.integers(0, 3)) == 0:
        kind = st.one_of(kinds)
    return draw(st.lists(kind, min_size=count, max_size=count))


@st.composite
def texts(draw: st.DrawFn, count: int) -> list[Any]:
    return draw(
        st.lists(draw(st.sampled_from([st.text(max_size=3), st.binary(max_size=3)])), min_size=count, max_size=count)
    )


@st.composite
def odd(draw: st.DrawFn, count: int) -> list[Any]:
    """Values that torch refuses, and leaves of unequal kinds."""
    values = [None, 1, 2.5, "s", b"b", torch.zeros(2), np.zeros(2), object, [1], {"a": 1}, np.array(["s"])]
    return [draw(st.sampled_from(values)) for _ in range(count)]


def leaves(count: int) -> st.SearchStrategy[list[Any]]:
    plain = st.one_of(tensors(count), arrays(count), numbers(count), texts(count))
    return st.one_of(plain, plain, plain, odd(count))


@st.composite
def columns(draw: st.DrawFn, count: int, depth: int) -> list[Any]:
    """Values of the same place in `count` samples."""
    if not depth or draw(st.booleans()):
        return draw(leaves(count))
    parts = [draw(columns(count, depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    rows = list(zip(*parts, strict=True))
    shape = draw(st.sampled_from(["tuple", "list", "dict", "ordered", "user", "point"]))
    if shape == "tuple":
        return rows
    if shape == "list":
        return [list(row) for row in rows]
    if shape == "point":
        return [Point(row[0], row[-1]) for row in rows]
    kind: Any = {"dict": dict, "ordered": OrderedDict, "user": UserDict}[shape]
    return [kind({f"k{n}": value for n, value in enumerate(row)}) for row in rows]


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    """The samples of one batch."""
    return draw(columns(draw(st.integers(1, 4)), 2))


@st.composite
def single_leaves(draw: st.DrawFn) -> list[Any]:
    """Samples without structure: one leaf each."""
    return draw(leaves(draw(st.integers(1, 4))))
