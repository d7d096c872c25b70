"""Saves and restores numpy's process-global generator, in a fraction of the time that numpy's own functions take, and
says whether it was drawn from.

Data path: none; around batches that are made in the user's own process.

`numpy.random.get_state` copies the generator's 624 words as one Python number each. Here they are copied in one piece,
from the address that `BitGenerator.ctypes` gives. Normal numbers are made in pairs, and whether the second of a pair is
still to come stands elsewhere: it does if the next normal number leaves the words as they are.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_KEY_BYTES = 624 * 4
_STATE_BYTES = _KEY_BYTES + 4
"""numpy's `mt19937_state`: the words, and the position among them."""

_global: Any = np.random  # its stubs lack two of the functions
# As they are before a program replaces any of them.
_get_generator, _set_generator = _global.get_bit_generator, _global.set_bit_generator
_seed, _get_state, _set_state, _normal = _global.seed, _global.get_state, _global.set_state, _global.standard_normal


@functools.cache
def _layout_is_known() -> bool:
    """Whether this version of numpy lays the state out as `_STATE_BYTES` says."""
    generator: Any = np.random.MT19937(1)
    state = generator.state["state"]
    expected = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return bool(_memory_of(generator).raw == expected)


@functools.lru_cache(maxsize=1)  # which keeps the generator, and so its memory, alive
def _memory_of(generator: Any) -> Any:
    return (ctypes.c_char * _STATE_BYTES).from_address(generator.ctypes.state_address)


def numpy_mark() -> Any:
    """Return a value that changes when numpy draws from its process-global generator."""
    state: Any = _get_state(legacy=False)
    inner = state["state"]
    if "pos" not in inner:  # the program has set another generator than numpy's usual one
        return str(state)
    # Not all of the 624 words: each draw moves `pos`, or renews the words, and a normal draw may set `has_gauss`.
    return inner["pos"], int(inner["key"][0]), state["has_gauss"]


def save_numpy_state() -> Callable[[], None]:
    """Return a function that sets numpy's process-global generator to its state of now. It stays as it is."""
    generator = _get_generator()
    if type(generator) is not np.random.MT19937 or not _layout_is_known():
        return functools.partial(_set_state, _get_state(legacy=False))
    memory = _memory_of(generator)
    words = memory.raw
    state = None
    try:
        normal = _normal()
        if memory.raw == words:
            state = _with_second(words, normal)
    finally:  # also after Ctrl-C
        restore = functools.partial(_restore, generator, memory, words, state)
        restore()
    return restore


def _with_second(words: bytes, normal: float) -> tuple[Any, ...]:
    """The state of these words in which a pair's second normal number is still to come, for `numpy.random.set_state`.

    numpy copies the words one by one: those of a list take 2 microseconds, those of an array 34.
    """
    key = np.frombuffer(words, np.uint32, _KEY_BYTES // 4).tolist()
    return "MT19937", key, int.from_bytes(words[_KEY_BYTES:], sys.byteorder), 1, normal


def _restore(generator: Any, memory: Any, words: bytes, with_second: tuple[Any, ...] | None) -> None:
    """Set the words, or the whole state. `generator` is named, so that its memory lives."""
    if _get_generator() is not generator:  # a sample's code has replaced it
        _set_generator(generator)
    if with_second is not None:
        _set_state(with_second)
        return
    _seed(0)  # drops the second normal number of a pair
    with generator.lock:
        memory.raw = words
