"""`random`'s process-global generator, saved and restored without its own functions: the same to the last number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncloader.workers.fetch import random_state
from asyncloader.workers.fetch.random_state import save_random_state

BEFORE: dict[str, Callable[[], Any]] = {
    "seeded": lambda: None,
    "in the middle of its words": lambda: random.getrandbits(32 * 7),
    "half of a pair of normal numbers is left": lambda: random.gauss(0, 1),
}
WITHIN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "seeding": lambda: random.seed(9),
    "numbers": lambda: random.getrandbits(32 * 1000),
    "a normal number": lambda: random.gauss(0, 1),
}


@pytest.fixture(autouse=True)
def generator_kept() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("before", BEFORE)
def test_the_state_comes_back(before: str, within: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving changes nothing, and restoring undoes everything, more than once; also by `random`'s own functions."""
    if not known:
        monkeypatch.setattr(random_state, "_memory", lambda: None)
    random.seed(3)
    BEFORE[before]()
    state = random.getstate()
    restore = save_random_state()
    assert random.getstate() == state
    for _ in range(2):
        WITHIN[within]()
        restore()
        assert random.getstate() == state


def test_the_memory_is_known() -> None:
    """The short way is taken with this version of Python."""
    assert random_state._memory() is not None
