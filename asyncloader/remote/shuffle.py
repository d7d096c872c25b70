"""A worker stream's shuffle buffer: blocks of samples, each in an order of its own. Pure.

Data path: shards -> ranges -> [shuffle] -> batch.

The stream is cut into blocks of `most` samples; each block comes out as a uniformly random permutation of itself. So a
sample moves by less than `most` places, and any order of a block is as likely as any other (as far as 64-bit keys
tell). While one block is given out, the next one fills at the same pace: a batch takes as many samples in as it gives
out, and never waits for a whole block. The first blocks are smaller, each twice its predecessor, so that the first
batch is there as soon as its own samples are. At most two blocks are in memory.

A sliding buffer (webdataset's, TensorFlow's) lets some samples move farther, but its content depends on everything that
came before: its state would be all of it. Of blocks, a state needs the place where the block begins, and two numbers.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from asyncloader.samplers.permutation import Permutation

__all__ = ["ShuffleBlocks"]

T = TypeVar("T")


class ShuffleBlocks(Generic[T]):
    """Two blocks: one that is given out, and one that fills.

    Args:
        most: items of a block; at least 1.
        key: chooses the orders; 0 to ``2**64 - 1``.
    """

    def __init__(self, most: int, key: int) -> None:
        self.most = most
        self.number = -1
        """Of the block that is given out."""
        self.aim = 0
        """Items that the filling block is to have; 0: it is the first."""
        self._key = key
        self.block: list[T] = []
        """The block that is given out, in the order in which it was filled."""
        self._order: list[int] = []
        self.given = 0
        """Items of the block that were given out."""
        self.filling: list[T] = []
        """The block that fills, in order."""

    @property
    def left(self) -> int:
        """Items of the block that were not given out."""
        return len(self.block) - self.given

    def missing(self, giving: int) -> int:
        """Items that the filling block should get before `giving` more are given out, so that both end together."""
        if not self.block:
            return max(0, self.aim - len(self.filling))
        return max(0, (self.given + giving) * self.aim // len(self.block) - len(self.filling))

    def begin(self, items: int) -> None:
        """The first block will have so many items."""
        if not self.aim:
            self.aim = min(self.most, max(1, items))

    def take(self, number: int) -> list[T]:
        """Give out that many, `left` at most."""
        order = self._order[self.given : self.given + number]
        self.given += number
        return [self.block[index] for index in order]

    def swap(self) -> bool:
        """The block was given out: go on with the one that filled. False if that is empty."""
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
        """Go on from a saved place; the blocks hold what they held."""
        self.number, self.aim, self.given, self.block, self.filling = number, aim, given, block, filling
        self._arrange()

    def rest(self) -> list[T]:
        """Everything that was not given out."""
        return [*(self.block[index] for index in self._order[self.given :]), *self.filling]

    def _arrange(self) -> None:
        size = len(self.block)
        self._order = Permutation(size, self._key, max(0, self.number))(np.arange(size)).tolist()
