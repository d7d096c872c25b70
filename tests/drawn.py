"""How many examples a drawn test draws: all that it names with ``pytest --all``, and a fifth otherwise."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

WHOLE, FEW = 100, 20  # examples where a test names no number


def choose(*, whole: bool) -> None:
    """Say how many: before the tests are imported, whose decorators ask."""
    slow = [HealthCheck.too_slow]  # a loaded machine draws slowly
    settings.register_profile("tests", max_examples=WHOLE if whole else FEW, deadline=None, suppress_health_check=slow)
    settings.load_profile("tests")


def scaled(number: int) -> int:
    """So many with ``--all``."""
    return -(-number * settings().max_examples // WHOLE)
