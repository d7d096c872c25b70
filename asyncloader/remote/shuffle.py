"""A worker stream's shuffle buffer: blocks of samples, each in a random order of its own. Pure.

Data path: shard ranges -> [shuffle] -> batch.

The stream is cut into blocks of `most` samples, and each block is returned in a uniformly random permutation. So a
sample moves by less than `most` positions, and all orders of a block are equally likely (as far as 64-bit keys allow).
While a block is consumed, the next block fills at the same rate: a batch adds the number of samples that it takes, and
never waits for a whole block. The first blocks are smaller, each twice as large as the block before, so that the first
batch waits only for its own samples. At most two blocks are in memory.

A sliding buffer (as in webdataset and TensorFlow) lets some samples move farther, but its content depends on all
samples before it, so its state would be its whole content. The state of a block is the position at which it begins, and
two numbers.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from asyncloader.samplers.permutation import Permutation

T = TypeVar("T")


class ShuffleBlocks(Generic[T]):
    """Two blocks: the consumer takes items from one while the other fills.

    Args:
        most: items per block; at least 1.
        key: seed of the orders; 0 to ``2**64 - 1``.
    """

    def __init__(self, most: int, key: int) -> None:
        self.most = most
        self.number = -1
        """Index of the block that is consumed."""
        self.aim = 0
        """Target size of the block that is filling; 0 before the first block, when it is unknown."""
        self._key = key
        self.block: list[T] = []
        """The block that is consumed, in the order in which it was filled."""
        self._order: list[int] = []
        self.given = 0
        """Items of the block that were returned."""
        self.filling: list[T] = []
        """The block that is filling, in order."""

    @property
    def left(self) -> int:
        """Items of the block that are not returned yet."""
        return len(self.block) - self.given

    def missing(self, giving: int) -> int:
        """Items to add to the filling block before `giving` more are returned, so that both blocks end together."""
        if not self.block:
            return max(0, self.aim - len(self.filling))
        # In proportion to the consumed part of the other block.
        return max(0, (self.given + giving) * self.aim // len(self.block) - len(self.filling))

    def begin(self, items: int) -> None:
        """Set the size of the first block."""
        if not self.aim:
            self.aim = min(self.most, max(1, items))

    def take(self, number: int) -> list[T]:
        """Return the next `number` items, at most `left`."""
        order = self._order[self.given : self.given + number]
        self.given += number
        return [self.block[index] for index in order]

    def swap(self) -> bool:
        """Continue with the block that was filling, after the other block was consumed. False if it is empty."""
        self.block, self.filling = self.filling, []
        self.given = 0
        self._order = []
        if not self.block:
            return False
        self.number += 1
        self.aim = min(self.most, 2 * len(self.block))
        self._arrange()
        return True

    def restore(self, number: int, aim: int, given: int, block: list[T], filling: list[T]) -> None:
        """Resume at a saved position, with blocks of the same items as before."""
        self.number, self.aim, self.given, self.block, self.filling = number, aim, given, block, filling
        self._arrange()

    def _arrange(self) -> None:
        size = len(self.block)
        self._order = Permutation(size, self._key, max(0, self.number))(np.arange(size)).tolist()
