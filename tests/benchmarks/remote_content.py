"""The content of the benchmarks' store. Every byte follows from a key, so that a reader can check each object.

All content is cut out of one random pattern: object i is the bytes from 64 * i on. The store needs no copy to serve it,
the first eight bytes name the object, and no two of them are equal.
"""

from __future__ import annotations

import tarfile
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LARGE, SMALL = 65_536, 4_096
"""Bytes of a sample. Multiples of a tar file's 512."""

STRIDE = 64  # bytes between the beginnings of two objects
BLOCK = 512  # of a tar file
SEED = 20_251


class Shards(NamedTuple):
    """A set of tar files, each member of which is an object.

    Args:
        folder: their name in the store.
        files: how many.
        each: objects in a file.
        size: bytes of an object.
    """

    folder: str
    files: int
    each: int
    size: int

    @property
    def objects(self) -> int:
        """Of all files."""
        return self.files * self.each


LARGE_SHARDS = Shards("large", files=1024, each=64, size=LARGE)
SMALL_SHARDS = Shards("small", files=256, each=1024, size=SMALL)
SHARDS = {shards.folder: shards for shards in (LARGE_SHARDS, SMALL_SHARDS)}

OBJECTS = max(LARGE_SHARDS.objects, SMALL_SHARDS.objects)
"""How many there are."""


class Content:
    """The pattern, and where objects are in it.

    Args:
        objects: how many there are.
    """

    def __init__(self, objects: int = OBJECTS) -> None:
        self.objects = objects
        self.pattern = np.random.default_rng(SEED).bytes(STRIDE * objects + LARGE)
        self.view = memoryview(self.pattern)
        self.words: npt.NDArray[np.uint64] = np.frombuffer(self.pattern, np.uint64)

    def object(self, index: int, size: int = LARGE) -> memoryview:
        """The bytes of object `index`."""
        return self.view[STRIDE * index : STRIDE * index + size]

    @cached_property
    def _sorted(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        first = self.words[: self.objects * (STRIDE // 8) : STRIDE // 8]
        order = np.argsort(first)
        return first[order], order

    def places(self, samples: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Which objects these are: bytes of shape (n, size) to n indices.

        Raises:
            WrongContent: a sample begins or ends differently from every object, or the first sample differs in between.
        """
        words = samples.view(np.uint64)
        names, order = self._sorted
        found = order[np.minimum(np.searchsorted(names, words[:, 0]), self.objects - 1)]
        starts = found * (STRIDE // 8)
        last = words.shape[1] - 1
        if not (self.words[starts] == words[:, 0]).all() or not (self.words[starts + last] == words[:, last]).all():
            raise WrongContent("a sample is no object of the store")
        if not np.array_equal(self.words[starts[0] : starts[0] + last + 1], words[0]):
            raise WrongContent(f"object {found[0]} came with other bytes")
        return found

    def tar(self, shards: Shards, number: int) -> list[memoryview]:
        """The parts of one tar file, to be sent one after the other."""
        parts: list[memoryview] = []
        first = number * shards.each
        heads = memoryview(_heads(first, shards.each, shards.size))
        for at in range(shards.each):
            parts += [heads[BLOCK * at : BLOCK * (at + 1)], self.object(first + at, shards.size)]
        return [*parts, memoryview(bytes(2 * BLOCK))]


class WrongContent(Exception):
    """A loader delivered something else than the store holds: its speed means nothing."""


def tar_size(shards: Shards) -> int:
    """Bytes of one file."""
    return shards.each * (BLOCK + shards.size) + 2 * BLOCK


def _heads(first: int, count: int, size: int) -> bytes:
    """The heads of `count` members called 00000000.bin and so on, from number `first` on."""
    member = tarfile.TarInfo("00000000.bin")
    member.size = size
    one = np.frombuffer(member.tobuf(tarfile.USTAR_FORMAT), np.uint8)
    heads = np.tile(one, (count, 1))
    digits = (np.arange(first, first + count)[:, None] // 10 ** np.arange(7, -1, -1)) % 10
    heads[:, :8] = digits + ord("0")
    # The sum of all bytes, those of the sum itself taken as spaces: six octal digits, a NUL and a space.
    heads[:, 148:156] = ord(" ")
    sums: Any = heads.sum(1, dtype=np.int64)
    heads[:, 148:154] = (sums[:, None] // 8 ** np.arange(5, -1, -1)) % 8 + ord("0")
    heads[:, 154] = 0
    return heads.tobytes()
