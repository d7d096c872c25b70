"""A process that shares a cache directory with others. Run by `test_cache_processes`; the arguments are its role."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import aclosing
from hashlib import sha256

from asyncloader.transports import CachedTransport, MemoryTransport, TransportError

OBJECTS = 24


def tell(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def content(number: int, version: int) -> bytes:
    """Return an object's bytes: its length, and each block of it, depend on the object's number and version."""
    block = sha256(f"{number} {version}".encode()).digest()
    return block * (1 + (number * 7919) % 4000)


class Changing(MemoryTransport):
    """A store with the same objects in every process, in versions that the process chooses."""

    def __init__(self) -> None:
        super().__init__({str(number): content(number, 0) for number in range(OBJECTS)})
        self.versions = [0] * OBJECTS

    def change(self, number: int) -> None:
        self.versions[number] = (self.versions[number] + 1) % 3
        self.put(str(number), content(number, self.versions[number]))


class Slow(MemoryTransport):
    """A store that reports each range on stdout, and goes on after a line on stdin."""

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        tell(f"range {start} {length}")
        await asyncio.to_thread(sys.stdin.readline)
        return await super().read_range(path, start, length)


async def work(folder: str, limit: int, seed: int, turns: int) -> None:
    """Read and stream objects in ways drawn from the seed, and compare every byte."""
    draw = random.Random(seed)
    store = Changing()
    async with CachedTransport(store, "memory://shared", folder, limit, threads=4) as transport:

        async def one() -> None:
            number = draw.randrange(OBJECTS)
            path, way = str(number), draw.random()
            if way < 0.05:
                store.change(number)
            expected = store._objects[path]
            if way < 0.4:
                found = await transport.read(path)
            elif way < 0.5:
                expected = expected[8:24]
                found = await transport.read_range(path, 8, 16)
            else:
                size, start = draw.choice([1000, 30_000, 1 << 20]), 32 if way > 0.9 else 0
                leave = draw.randrange(9) if way > 0.8 else -1
                expected, found = expected[start:], b""
                async with aclosing(transport.stream(path, start=start, chunk_size=size)) as chunks:
                    async for chunk in chunks:
                        found += chunk
                        leave -= 1
                        if leave == -1:
                            expected = expected[: len(found)]
                            break
            if found != expected and found != store._objects[path]:
                # It may have been changed by another task of this process while it was read.
                whole = {content(number, version) for version in range(3)}
                if not any(found in version for version in whole):
                    raise AssertionError(f"object {number}: {len(found)} bytes that are of none of its versions")

        for _ in range(turns // 8):
            await asyncio.gather(*(one() for _ in range(8)))
            tell("turn")
        counts = transport.cache_counts
        tell(f"{counts.hits} {counts.misses} {counts.evictions}")


async def read_part(folder: str, start: int, length: int) -> None:
    """Read a range, waiting for a line at each request; report whether it was right, and hits and misses."""
    data = content(1, 0) * 20
    async with CachedTransport(Slow({"a": data}), "memory://fill", folder, threads=2) as transport:
        found = await transport.read_range("a", start, length)
        counts = transport.cache_counts
        tell(f"{'right' if found == data[start : start + length] else 'wrong'} {counts.hits} {counts.misses}")


def main(role: str, folder: str, *numbers: str) -> None:
    if role == "work":
        limit, seed, turns = map(int, numbers)
        asyncio.run(work(folder, limit, seed, turns))
    elif role == "part":
        asyncio.run(read_part(folder, *map(int, numbers)))
    else:
        raise TransportError(f"no such role: {role}")


if __name__ == "__main__":
    main(*sys.argv[1:])
