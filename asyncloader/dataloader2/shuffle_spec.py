"""`ShuffleSpec`, a name that torchdata reserved for descriptions of shuffles.

Data path: none.
"""

from __future__ import annotations

from abc import ABC

__all__ = ["ShuffleSpec"]


class ShuffleSpec(ABC):  # noqa: B024 - empty in torchdata, too
    """Empty, as in torchdata."""
