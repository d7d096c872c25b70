"""Generates a graph's seeds: shared ones, equal in all workers and ranks, and own ones, different in each.

Data path: DataLoader2 -> [seed_generator] -> the `set_seed` of a graph's datapipes, at the beginning of each epoch.
"""

from __future__ import annotations

import operator

from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.workers.fetch.seeding import draw_seed

_UINT64 = 1 << 64


def checked_seed(seed: int) -> int:
    """The seed, as an `int`.

    Raises:
        TypeError: it is no integer.
        ValueError: it is not between 0 and 2**64 - 1.
    """
    if not 0 <= operator.index(seed) < _UINT64:
        raise ValueError(f"Expected an uint64 seed, but got {seed}.")
    return operator.index(seed)


class SeedGenerator:
    """Two streams of 64-bit seeds: one is the same in all workers and ranks, the other one's own.

    Args:
        seed: 0 to 2**64 - 1; default None: it is drawn from torch's global generator.

    Raises:
        ValueError: the seed is out of range.
    """

    def __init__(self, seed: int | None = None, _rngs: tuple[PhiloxEngine, PhiloxEngine] | None = None) -> None:
        if seed is not None and _rngs is not None:
            raise ValueError("Cannot have seed and _rngs specified at the same time")
        if _rngs is None:
            self._shared_rng, self._worker_rng = PhiloxEngine(), PhiloxEngine()
            self.seed(seed)
        else:
            self._shared_rng, self._worker_rng = _rngs

    def seed(self, seed: int | None = None) -> None:
        """Begin both streams anew; None: with a seed from torch's global generator, which advances."""
        if seed is None:
            seed = draw_seed()
        seed = checked_seed(seed)
        self._shared_rng.seed(seed)
        self._worker_rng.seed(seed)

    def generate_shared_seed(self) -> int:
        """The next seed that all workers and ranks share."""
        return self._shared_rng.generate()

    def generate_seed(self) -> int:
        """The next seed of this process's own."""
        return self._worker_rng.generate()

    def spawn(self, worker_id: int, inplace: bool = False) -> SeedGenerator:
        """A generator for a worker or rank: shared seeds as here, own seeds of its own.

        Args:
            worker_id: its number, from 0.
            inplace: this generator becomes that one, and is returned; default False: a new one.

        Raises:
            ValueError: the number is negative.
        """
        if worker_id < 0:
            raise ValueError(f"Expected `rank` equal or larger than 0, but got {worker_id}.")
        if inplace:
            self._worker_rng = self._worker_rng.spawn(worker_id)
            return self
        return SeedGenerator(_rngs=(self._shared_rng.clone(), self._worker_rng.spawn(worker_id)))
