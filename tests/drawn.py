"""The number of examples of drawn tests: all that a test names with ``pytest --all``, and a fifth otherwise."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

WHOLE, FEW = 100, 20  # examples where a test names no number


def choose(*, whole: bool) -> None:
    """Set the number. This must be called before the tests are imported: their decorators read it."""
    slow = [HealthCheck.too_slow]  # a loaded machine draws slowly
    settings.register_profile("tests", max_examples=WHOLE if whole else FEW, deadline=None, suppress_health_check=slow)
    settings.load_profile("tests")


def scaled(number: int) -> int:
    """Return this number with ``--all``, and a fifth of it otherwise."""
    return -(-number * settings().max_examples // WHOLE)
