"""How many examples a drawn test draws: all that it names with ``pytest --all``, and a fifth otherwise."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["FEW", "WHOLE", "scaled"]

# `conftest.py` loads one of them before it imports a test.
WHOLE, FEW = settings(max_examples=100), settings(max_examples=20)


def scaled(number: int) -> int:
    """So many with ``--all``."""
    return -(-number * settings.default.max_examples // WHOLE.max_examples)
