"""Philox 4x32-10: random 64-bit numbers from a key and a counter, so that a stream can be split without overlap.

Data path: none. `SeedGenerator` draws a graph's seeds from it.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import copy
from typing import Self

_WORD = 0xFFFFFFFF
_ROUNDS = 10


class PhiloxEngine:
    """A generator of 64-bit numbers that can be split into independent ones.

    Args:
        seed: 64 bits; default None: `seed` is called before the first `generate`.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._key: tuple[int, int] | None = None
        self._drawn = 0
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> Self:
        """Begin the stream of this seed. Returns this engine."""
        self._key = seed & _WORD, seed >> 32 & _WORD
        self._drawn = 0
        return self

    def generate(self) -> int:
        """Return the next number, 0 to 2**64 - 1.

        Raises:
            AssertionError: the engine has no seed.
        """
        number = self._number(0, self._drawn)
        self._drawn += 1
        return number

    def clone(self) -> PhiloxEngine:
        """Return a copy, which continues with the numbers that this engine will give."""
        return copy.copy(self)

    def spawn(self, index: int) -> PhiloxEngine:
        """Split off a new engine. It follows from the seed and the index, and not from the numbers drawn so far.

        Raises:
            AssertionError: the index is negative, or the engine has no seed.
        """
        assert index >= 0, f"Expected a non-negative value for spawn, but found {index}"
        # From another stream than `generate` reads, so that no number of this engine is the seed of another engine.
        return PhiloxEngine(self._number(1, index))

    def _number(self, stream: int, position: int) -> int:
        assert self._key is not None, "Please provide seed to PhiloxEngine"
        a, b, c, d = position & _WORD, position >> 32 & _WORD, stream, 0
        low, high = self._key
        for _ in range(_ROUNDS):
            first, second = a * 0xD2511F53, c * 0xCD9E8D57
            a, b, c, d = second >> 32 ^ b ^ low, second & _WORD, first >> 32 ^ d ^ high, first & _WORD
            low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
        return b << 32 | a
