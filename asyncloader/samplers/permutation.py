"""Computes a shuffle instead of storing it: a keyed bijection on [0, n). Pure.

Data path: [permutation] -> seeded sampler -> scheduler.

The n indices are laid out in a rectangle of ``rows x columns`` cells that is hardly larger than n, and an index is a
cell (row, column). A round of a Feistel network turns one coordinate by a hash of the other; whatever the hash, that
can be undone, so the rounds together are a bijection of the rectangle. The few cells beyond n are walked over: the
bijection is applied again until it leads to an index (cycle walking), which makes it a bijection of [0, n).

Position i of the shuffled order is found without the positions before it, in O(1) time and memory.

Sources: Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), for both ideas and, in their
generalized Feistel cipher, the rectangle. The hash is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). It is a shuffle, not a cipher.
"""

from __future__ import annotations

import hashlib
import math
from operator import index

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Cells = npt.NDArray[np.uint64]

LARGEST = 1 << 62
"""Most elements a permutation may have: sums of two coordinates, and of the cells of the rectangle, fit in 63 bits."""

_ROUNDS = 8
_SMALL, _ROUNDS_SMALL = 1 << 16, 16
"""Small domains need more rounds: with eight, the 120 permutations of five elements are not equally frequent; with
sixteen, the permutations of up to seven elements are, as far as 20,000 keys show."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


class Permutation:
    """The permutation of [0, n) for a seed and an epoch. It is the same on every machine and in every version.

    Args:
        n: number of elements, 0 to 2**62.
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1. Neighbouring seeds and epochs have nothing in common.

    Raises:
        TypeError: seed or epoch is not an integer.
        ValueError: an argument is out of range.
    """

    __slots__ = ("_columns", "_keys", "_rows", "_swap", "n")

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        seed, epoch = index(seed), index(epoch)  # numpy's integers are integers, too
        if not 0 <= n <= LARGEST:
            raise ValueError(f"a permutation has between 0 and 2**62 elements, but got n={n}")
        for name, value in (("seed", seed), ("epoch", epoch)):
            if not 0 <= value < 1 << 64:
                raise ValueError(f"{name} should be between 0 and 2**64 - 1, but got {name}={value}")
        self.n = n
        rows = max(1, math.isqrt(max(0, n - 1)) + 1)
        self._rows = np.uint64(rows)
        self._columns = np.uint64(max(1, -(-n // rows)))
        rounds = _ROUNDS_SMALL if n < _SMALL else _ROUNDS
        secret = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        digest = hashlib.shake_256(b"asyncloader shuffle" + secret).digest(8 * rounds + 8)
        *keys, parity = np.frombuffer(digest, "<u8").astype(np.uint64)
        self._keys = tuple(keys)
        self._swap = bool(int(parity) & 1) and n > 1

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"<Permutation of {self.n}>"

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """Return the elements at these positions of the shuffled order.

        Args:
            positions: integers in [0, n), of any shape.

        Returns:
            int64, of the same shape.

        Raises:
            TypeError: the positions are not integers.
            IndexError: a position is out of range.
        """
        found = self._forward(self._check(positions))
        n = np.uint64(self.n)
        outside = np.flatnonzero(found >= n)
        # Ends: the bijection leads each of them along a cycle that contains an index.
        while outside.size:
            found[outside] = self._forward(found[outside])
            outside = outside[found[outside] >= n]
        elements = found.astype(np.int64).reshape(np.shape(positions))
        # Exchange 0 and 1 for half of the keys: the rounds make only even permutations of a rectangle with odd sides.
        return np.where(elements < 2, 1 - elements, elements) if self._swap else elements

    def _check(self, values: npt.ArrayLike) -> Cells:
        given = np.asarray(values)
        if not given.size:
            return np.zeros(0, np.uint64)
        if not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"positions should be integers, but got {given.dtype}")
        lowest, highest = int(given.min()), int(given.max())
        if lowest < 0 or highest >= self.n:
            raise IndexError(f"position {min(lowest, 0) or highest} is out of range for a permutation of {self.n}")
        return given.astype(np.uint64).ravel()

    def _forward(self, cells: Cells) -> Cells:
        row, column = np.divmod(cells, self._columns)
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + hashed(column, even) % self._rows) % self._rows
            column = (column + hashed(row, odd) % self._columns) % self._columns
        return row * self._columns + column


def hashed(values: Cells, key: np.uint64) -> Cells:
    """Return a hash of each value under the key."""
    # Overflow wraps, as in SplitMix64.
    mixed = values + key
    mixed = (mixed ^ (mixed >> _S30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _S27)) * _MIX_2
    return mixed ^ (mixed >> _S31)
