"""Saves and restores `random`'s process-global generator, in a fraction of the time that its own functions take.

Data path: none; around batches that are made in the user's own process.

`random.getstate` makes a Python number of each of the generator's 624 words: 20 kB, for which other data leave the
processor's nearest cache. Here the words are copied in one piece, from where CPython has them in the generator's
object.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from array import array
from collections.abc import Callable
from typing import Any

_STATE_BYTES = 4 + 624 * 4
"""The fields of CPython's `RandomObject`: the position among the words, and the words."""

_generator: Any = random._inst  # the process-global one
_get_state, _set_state = random.getstate, random.setstate  # as they are before a program replaces them


@functools.cache
def _memory() -> Any:
    """Return the memory of the fields; None where this version of Python has them elsewhere, or lets other threads draw
    while they are copied.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    head: int = object.__basicsize__
    fields: Any = random.Random.__base__
    if fields.__basicsize__ < head + _STATE_BYTES:
        return None
    memory = (ctypes.c_char * _STATE_BYTES).from_address(id(_generator) + head)
    *words, position = _get_state()[1]
    return memory if memory.raw == array("I", [position, *words]).tobytes() else None


def save_random_state() -> Callable[[], None]:
    """Return a function that sets the process-global generator of `random` to its state of now."""
    memory = _memory()
    if memory is None:
        return functools.partial(_set_state, _get_state())
    return functools.partial(_restore, memory, memory.raw, _generator.gauss_next)


def _restore(memory: Any, fields: bytes, gauss_next: float | None) -> None:
    memory.raw = fields
    _generator.gauss_next = gauss_next
