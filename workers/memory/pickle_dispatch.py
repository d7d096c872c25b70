"""Finds the function that reduces an object of a type for pickling.

Data path: worker: collate -> codec: [pickle_dispatch] -> ring.
"""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable
from typing import Any

import torch

_BY_OWN_RULES = operator.methodcaller("__reduce_ex__", 5)


class Dispatch(dict[type, Any]):
    """The reductions by type: the encoder's own, those in `copyreg`, and one for all subclasses of tensors."""

    def __init__(self, own: dict[type, Any], tensor: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(own)
        self._own = len(own)
        self._tensor = tensor

    def __missing__(self, kind: type) -> Any:
        found = copyreg.dispatch_table.get(kind)
        if found is None and issubclass(kind, torch.Tensor):
            found = self._tensor
        elif found is None and not issubclass(kind, type):
            found = _BY_OWN_RULES  # the pickler would do the same after a KeyError, but it would ask for each object
        if found is None:
            raise KeyError(kind)
        self[kind] = found
        return found

    def forget(self) -> None:
        """Forget the reductions that were found: a user may have registered other functions since."""
        if len(self) > self._own:
            for kind in list(self)[self._own :]:
                del self[kind]
