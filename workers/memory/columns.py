"""Collates samples that are plain dictionaries, tuples or lists column by column: torch's `collate`, in less time.

Data path: fetch -> collate: [columns] -> codec or consumer.

torch compares the type of the first sample, and of the first value of each column, with every type that has a function.
Here both are looked up. All other samples are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data._utils import collate as torch_collate

_KINDS = torch_collate.default_collate_fn_map.copy().keys()  # the types that torch has functions for

Functions = Mapping[Any, Callable[..., Any]]
"""The functions that collate a column, by the type of its first value."""


def collate(samples: Sequence[Any], functions: Functions) -> Any:
    """Return what ``torch.utils.data._utils.collate.collate(samples, collate_fn_map=functions)`` returns.

    Raises:
        Exception: the same errors. A function may have been called before with the same column.
    """
    # A function for another type may be meant for the samples themselves.
    if functions.keys() == _KINDS and isinstance(samples, (list, tuple)) and samples:
        first = samples[0]
        kind = type(first)
        if kind is dict:
            with suppress(TypeError):  # torch tries again, and raises the error
                return {key: _column([sample[key] for sample in samples], functions) for key in first}
        # Also for lists: torch returns a copy of the first sample, with other items.
        elif (kind is tuple or kind is list) and {*map(type, samples)} == {kind} and len({*map(len, samples)}) == 1:
            return [_column(column, functions) for column in zip(*samples, strict=True)]
    return torch_collate.collate(samples, collate_fn_map=functions)  # type: ignore[arg-type]


def _column(values: Sequence[Any], functions: Functions) -> Any:
    function = functions.get(type(values[0]))
    if function is not None:
        return function(values, collate_fn_map=functions)
    return torch_collate.collate(values, collate_fn_map=functions)  # type: ignore[arg-type]
