"""The per-token fields of a sequence: which they are, how they are cut, and how they are joined. Pure.

Data path: none; used by collate, sequence_rows and packed_loader.

A sequence is an array of tokens, or a mapping of fields: arrays with an element for each token, and anything else.
"""

from __future__ import annotations

import cmath
from collections.abc import Collection, Mapping, Sequence
from functools import cache, reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Array: TypeAlias = torch.Tensor | npt.NDArray[Any]

TOKENS = "tokens"
"""The field's name if a sequence is not a mapping."""


def per_token(value: Any) -> Array | None:
    """Return a field's values as an array with an element for each token; None if it is something else.

    Tensors and arrays with an axis, and lists and tuples of numbers, have an element for each token.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return value if value.ndim else None
    if isinstance(value, list | tuple):
        try:
            array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
        except ValueError:  # a list of lists of different lengths
            return None
        return array if array.dtype.kind in "biuf" and array.ndim else None
    return None


def token_fields(sequence: Any) -> dict[str, Array]:
    """Return the fields of a sequence that have an element for each token, by name.

    Raises:
        TypeError: it has no such field.
        ValueError: two of them have different numbers of elements.
    """
    named: Mapping[Any, Any] = sequence if isinstance(sequence, Mapping) else {TOKENS: sequence}
    fields = {name: array for name, value in named.items() if (array := per_token(value)) is not None}
    if not fields:
        raise TypeError(
            "a sequence should be a tensor, an array or a list of tokens, or a mapping with such fields, but it is "
            f"{type(sequence).__name__}: {sequence!r:.100}"
        )
    sizes = {name: len(array) for name, array in fields.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the fields of a sequence should have an element for each token, but they have {sizes}: leave out the "
            "fields that do not"
        )
    return fields


def cut(sequence: Any, start: int, stop: int) -> Any:
    """Return the tokens `start` to `stop` of a sequence: a sequence of the same kind.

    Raises:
        TypeError, ValueError: as `token_fields`; or the sequence has fewer than `stop` tokens.
    """
    fields = token_fields(sequence)
    size = len(next(iter(fields.values())))
    if stop > size:
        raise ValueError(f"the sequence has {size} tokens, but the plan has {stop} or more: give the lengths of now")
    parts = {name: array[start:stop] for name, array in fields.items()}
    return {**sequence, **parts} if isinstance(sequence, Mapping) else parts[TOKENS]


def join(arrays: Sequence[Array]) -> torch.Tensor:
    """Return the elements of one or more arrays, one behind the other, in memory of their own and of their
    `common_type`. Tensors stay on their device.

    Raises:
        ValueError: they have no common type.
    """
    types = {array.dtype for array in arrays}
    if len(types) == 1 and all(isinstance(array, np.ndarray) for array in arrays):
        return torch.from_numpy(np.concatenate(arrays))
    tensors = [
        # A copy: torch warns of arrays that are read-only, and refuses those of the other byte order.
        torch.from_numpy(np.array(array, array.dtype.newbyteorder("="))) if isinstance(array, np.ndarray) else array
        for array in arrays
    ]
    kind = common_type({tensor.dtype for tensor in tensors})
    return torch.cat([tensor.to(kind) for tensor in tensors])


def common_type(kinds: Collection[torch.dtype]) -> torch.dtype:
    """Return the type of elements that are joined: the smallest integer type that holds all of them; where some are of
    floating point, torch's for these.

    Raises:
        ValueError: there is no such type.
    """
    if len(kinds) == 1:
        return next(iter(kinds))
    if floating := [kind for kind in kinds if kind.is_floating_point or kind.is_complex]:
        return reduce(torch.promote_types, floating)
    # By numpy: torch does not know all pairs of unsigned types.
    common = np.result_type(*(torch.empty(0, dtype=kind, device="cpu").numpy().dtype for kind in kinds))
    if common.kind == "f":
        named = " and ".join(sorted(map(str, kinds)))
        raise ValueError(f"values of the types {named} cannot be joined: no integer type holds both")
    return torch.from_numpy(np.empty(0, common)).dtype


@cache
def holds(kind: torch.dtype, value: float) -> bool:
    """Return whether a type has a value, or, if it is of floating point, a value within 1 % of it."""
    try:
        kept: Any = torch.full((), value, dtype=kind, device="cpu").item()
    except (RuntimeError, OverflowError):
        return False
    if kind.is_floating_point or kind.is_complex:
        return cmath.isclose(kept, value, rel_tol=0.01) or (cmath.isnan(kept) and cmath.isnan(value))
    return bool(kept == value)
