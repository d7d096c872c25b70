"""Generates a graph's seeds: shared seeds are equal in all workers and ranks, own seeds differ in each.

Data path: DataLoader2 -> [seed_generator] -> the `set_seed` of a graph's datapipes, at the beginning of each epoch.
"""

from __future__ import annotations

import operator

from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.workers.fetch.seeding import draw_seed

_UINT64 = 1 << 64


def check_seed(seed: int) -> int:
    """Return the seed as an `int`.

    Raises:
        TypeError: the seed is no integer.
        ValueError: the seed is not between 0 and 2**64 - 1.
    """
    if not 0 <= operator.index(seed) < _UINT64:
        raise ValueError(f"Expected an uint64 seed, but got {seed}.")
    return operator.index(seed)


class SeedGenerator:
    """Gives 64-bit seeds from two streams: all workers and ranks share the first, each has its own second.

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
        """Begin both streams from this seed; None: from a seed of torch's global generator, which advances."""
        if seed is None:
            seed = draw_seed()
        seed = check_seed(seed)
        self._shared_rng.seed(seed)
        self._worker_rng.seed(seed)

    def generate_shared_seed(self) -> int:
        """Return the next seed of the shared stream."""
        return self._shared_rng.generate()

    def generate_seed(self) -> int:
        """Return the next seed of this process's own stream."""
        return self._worker_rng.generate()

    def spawn(self, worker_id: int, inplace: bool = False) -> SeedGenerator:
        """Return the generator of a worker or rank: with this shared stream, and an own stream for the number.

        Args:
            worker_id: the worker's or rank's number, from 0.
            inplace: change and return this generator; default False: return a new one.

        Raises:
            ValueError: the number is negative.
        """
        if worker_id < 0:
            raise ValueError(f"Expected `rank` equal or larger than 0, but got {worker_id}.")
        if inplace:
            self._worker_rng = self._worker_rng.spawn(worker_id)
            return self
        return SeedGenerator(_rngs=(self._shared_rng.clone(), self._worker_rng.spawn(worker_id)))
