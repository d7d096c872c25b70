"""Equality to the bit, for values of any type that a batch may contain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Whether two batches are equal in types, structure, dtypes, shapes and bits."""
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def assert_same(a: Any, b: Any, where: str = "batch") -> None:
    """Fail with the path to the first difference."""
    assert type(a) is type(b), f"{where}: {type(a)} against {type(b)}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), where
        assert (a.requires_grad, a.is_conj()) == (b.requires_grad, b.is_conj()), where
        assert _bits(a) == _bits(b), f"{where}: {a} against {b}"
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        if a.dtype.hasobject:
            assert_same(a.tolist(), b.tolist(), where)
        else:
            assert a.tobytes() == b.tobytes(), f"{where}: {a} against {b}"
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, Sequence) and not isinstance(a, str | bytes | range):
        assert len(a) == len(b), f"{where}: length {len(a)} against {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif "__eq__" not in {name for base in type(a).__mro__[:-1] for name in vars(base)} and hasattr(a, "__dict__"):
        assert_same(vars(a), vars(b), f"{where}.__dict__")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a!r} against {b!r}"


def _bits(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().contiguous()
    # Not `reshape`: it keeps an odd stride of a single element.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
