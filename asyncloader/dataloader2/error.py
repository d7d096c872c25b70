"""The exception that pauses an iterator.

Data path: none.
"""

from __future__ import annotations

__all__ = ["PauseIteration"]


class PauseIteration(StopIteration):
    """Reading is paused; `DataLoader2Iterator.resume` lets it go on."""
