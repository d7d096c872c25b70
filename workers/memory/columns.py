"""Collates samples that are plain dictionaries, tuples or lists column by column: torch's `collate`, in less time.

Data path: fetch -> collate: [columns] -> codec or consumer.

torch compares the type of the first sample, and of the first value of each column, with every type that has a function.
Here both are looked up. All other samples are left to torch.

Samples that come from columns (`SampleColumns`) are not made: their columns of numbers are collated as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data._utils import collate as torch_collate

_KINDS = torch_collate.default_collate_fn_map.copy().keys()  # the types that torch has functions for

Functions = Mapping[Any, Callable[..., Any]]
"""The functions that collate a column, by the type of its first value."""


class SampleColumns(Sequence[Any]):
    """Samples that are plain dictionaries of plain values, each of which is made when it is asked for."""

    def columns(self) -> Mapping[str, list[Any] | npt.NDArray[Any]] | None:
        """Return the samples' values at each key. An array of one dimension holds Python's numbers, an array of more
        dimensions holds arrays. None: the samples are not known by column.
        """
        raise NotImplementedError


def collate(
    samples: Sequence[Any], functions: Functions, numbers: Callable[[npt.NDArray[Any]], Any] | None = None
) -> Any:
    """Return what ``torch.utils.data._utils.collate.collate(samples, collate_fn_map=functions)`` returns.

    Args:
        samples: of the batch.
        functions: see there.
        numbers: collates an array of Python's integers or floats, which no user sees before; so only where `functions`
            has no function of a user's for numbers and arrays. None: samples that come from columns are made.

    Raises:
        Exception: the same errors. A function may have been called before with the same column.
    """
    if isinstance(samples, SampleColumns):
        columns = samples.columns() if numbers is not None and functions.keys() == _KINDS else None
        if numbers is not None and columns is not None:
            with suppress(TypeError):  # torch tries again, and raises the error
                return {key: _whole_column(column, functions, numbers) for key, column in columns.items()}
        samples = list(samples)
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


def _whole_column(column: Any, functions: Functions, numbers: Callable[[npt.NDArray[Any]], Any]) -> Any:
    if not isinstance(column, np.ndarray):
        return _column(column, functions)
    if column.ndim > 1:
        # A copy, as the samples' own arrays would be: torch warns of an array that cannot be written to.
        return _column(list(column.copy()), functions)
    # Of unsigned integers of 64 bits, torch's dtype and error depend on the values.
    return _column(column.tolist(), functions) if column.dtype == np.uint64 else numbers(column)


def _column(values: Sequence[Any], functions: Functions) -> Any:
    function = functions.get(type(values[0]))
    if function is not None:
        return function(values, collate_fn_map=functions)
    return torch_collate.collate(values, collate_fn_map=functions)  # type: ignore[arg-type]
