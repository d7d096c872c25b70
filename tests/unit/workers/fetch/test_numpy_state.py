"""numpy's process-global generator, saved and restored without its own functions: the same to the last number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from asyncloader.workers.fetch import numpy_state
from asyncloader.workers.fetch.numpy_state import numpy_mark, save_numpy_state

numpy_random: Any = np.random  # its stubs lack two of the functions

BEFORE: dict[str, Callable[[], Any]] = {
    "seeded": lambda: np.random.seed(3),
    "in the middle of its words": lambda: np.random.random(7),
    "at the end of its words": lambda: (np.random.seed(3), np.random.random(312)),
    "half of a pair of normal numbers is left": lambda: (np.random.seed(3), np.random.standard_normal()),
    "both of the pair are drawn": lambda: (np.random.seed(3), np.random.standard_normal(2)),
}
WITHIN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "seeding": lambda: np.random.seed(9),
    "numbers": lambda: np.random.random(1000),
    "a normal number": np.random.standard_normal,
    "another generator": lambda: numpy_random.set_bit_generator(np.random.PCG64(1)),
}


@pytest.fixture(autouse=True)
def generator_kept() -> Iterator[None]:
    """These tests replace the process's generator: put it back afterwards."""
    generator: Any = numpy_random.get_bit_generator()
    state: Any = np.random.get_state()
    yield
    numpy_random.set_bit_generator(generator)
    np.random.set_state(state)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(
    ("within", "known"),
    # numpy's own function sets the state of whatever generator is there.
    [(name, known) for name in WITHIN for known in (True, False) if known or name != "another generator"],
)
def test_the_state_comes_back(before: str, within: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving changes nothing, and restoring undoes everything, more than once; also where numpy's own functions are
    used because its memory is laid out in another way.
    """
    if not known:
        monkeypatch.setattr(numpy_state, "_layout_is_known", lambda: False)
    BEFORE[before]()
    state = repr(np.random.get_state())
    restore = save_numpy_state()
    assert repr(np.random.get_state()) == state
    for _ in range(2):
        WITHIN[within]()
        restore()
        assert repr(np.random.get_state()) == state


def test_the_layout_is_known() -> None:
    """The short way is taken with the numpy that is installed."""
    assert numpy_state._layout_is_known()


def test_a_generator_of_another_kind() -> None:
    """A program may have given numpy another engine."""
    numpy_random.set_bit_generator(np.random.PCG64(5))
    state = repr(np.random.get_state(legacy=False))
    restore = save_numpy_state()
    np.random.standard_normal(3)
    restore()
    assert repr(np.random.get_state(legacy=False)) == state


@pytest.mark.parametrize("generator", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.parametrize("draw", [np.random.random, np.random.standard_normal, lambda: np.random.randint(9)])
def test_each_draw_changes_the_mark(generator: str, draw: Callable[[], Any]) -> None:
    """Whatever the global generator is."""
    numpy_random.set_bit_generator(getattr(np.random, generator)(1))
    marks = [numpy_mark()]
    assert numpy_mark() == marks[0]
    for _ in range(700):  # the words of the usual generator are renewed once
        draw()
        marks.append(numpy_mark())
    assert all(before != after for before, after in pairwise(marks))
