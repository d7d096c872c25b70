"""Counts the bytes of the tensors in a batch that was collated in the consumer's own process.

Data path: collate -> [batch_bytes] -> statistics, credits.
"""

from __future__ import annotations

from typing import Any

import torch

_FIRST_ELEMENTS, _FIRST_VALUES, _DEEPEST = 12, 64, 8  # of what `batch_nbytes` looks at


def batch_nbytes(batch: Any) -> int:
    """Bytes of the tensors in a batch, in plain containers only.

    A sequence of which the first elements hold no tensor, such as a list of token ids, is not read to its end: that
    could take longer than making the batch. Nor is a container within itself, or below many others.
    """
    kind = type(batch)
    if issubclass(kind, torch.Tensor):
        return int(batch.numel() * batch.element_size())
    return _nbytes_within(batch, kind, set()) if issubclass(kind, (dict, list, tuple)) else 0


def _nbytes_within(container: Any, kind: type, around: set[int]) -> int:
    if len(around) == _DEEPEST or id(container) in around:
        return 0
    around.add(id(container))
    # The types' own methods: a subclass may run the user's code.
    if issubclass(kind, dict):
        items, first = iter(dict.values(container)), _FIRST_VALUES
    else:
        items, first = (tuple if issubclass(kind, tuple) else list).__iter__(container), _FIRST_ELEMENTS
    found = 0
    for item in items:
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            found += item.numel() * item.element_size()
        elif issubclass(kind, (dict, list, tuple)):
            found += _nbytes_within(item, kind, around)
        first -= 1
        if not first and not found:
            break
    around.remove(id(container))
    return found
