from __future__ import annotations

import asyncio
import random
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import pytest

from asyncloader.transports import CachedTransport, MemoryTransport
from asyncloader.transports.cache_layout import ROOT_NAME
from asyncloader.transports.cache_usage import CacheCounts, CacheUsage
from asyncloader.transports.testing.subject import drain
from tests import script_server
from tests.helpers import cache_process
from tests.helpers.cache_process import OBJECTS, content
from tests.helpers.forking import fork
from tests.helpers.running import PATIENCE_S, ROOT, environment

LIMIT = 600_000  # about half of the size of all objects of `cache_process`


@contextmanager
def started(role: str, folder: Path, *numbers: int) -> Generator[subprocess.Popen[str]]:
    """Run a part of `cache_process`, which is killed at the end if it still runs."""
    command = [sys.executable, "-m", cache_process.__name__, role, str(folder), *map(str, numbers)]
    process = script_server.start(command, env=environment(), cwd=ROOT, stdin=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE_S)[0], "the process says nothing"
    words = process.stdout.readline().strip()
    assert words, process.communicate(timeout=PATIENCE_S)[1]
    return words


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> list[str]:
    """The words of the process's last line; fails with its standard error if the process failed."""
    words, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert errors == ""
    return words.split("\n")[-2].split()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)


def files(folder: Path, part: str) -> list[Path]:
    return [file for file in (folder / ROOT_NAME / part).rglob("*") if file.is_file()]


def disk_use(folder: Path) -> int:
    found = files(folder, "objects") + files(folder, "fills")
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in found)


def account(folder: Path) -> int:
    """The usage that the cache has recorded."""
    found = CacheUsage(str(folder / ROOT_NAME), None, CacheCounts()).total()
    assert found is not None
    return found


async def read_all(folder: Path) -> CachedTransport:
    """Read every object of `cache_process` through the cache, and compare its bytes."""
    objects = {str(number): content(number, 0) for number in range(OBJECTS)}
    async with CachedTransport(MemoryTransport(objects), "memory://shared", folder, LIMIT) as transport:
        for path, data in objects.items():
            assert await transport.read(path) == data
    return transport


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_processes_that_fill_and_evict_together(tmp_path: Path, seed: int) -> None:
    """Processes that read, stream, change and leave objects at the same time get the right bytes; the limit holds."""
    with started("work", tmp_path, LIMIT, seed, 240) as one, started("work", tmp_path, LIMIT, seed + 100, 240) as two:
        hits, misses, evictions = (
            sum(numbers) for numbers in zip(*(map(int, finish(each)) for each in [one, two]), strict=True)
        )
        assert min(hits, misses, evictions) > 0
    assert files(tmp_path, "fills") == []
    assert 0 < disk_use(tmp_path) <= min(LIMIT, account(tmp_path))
    asyncio.run(read_all(tmp_path))
    assert disk_use(tmp_path) <= LIMIT


@pytest.mark.chaos
def test_processes_that_are_killed(tmp_path: Path) -> None:
    """Whatever killed processes leave, the others continue; the remains are deleted, and no byte is wrong."""
    draw = random.Random(5)
    with started("work", tmp_path, LIMIT, 7, 2400) as steady:
        assert line(steady) == "turn"
        for seed in range(8):
            with started("work", tmp_path, LIMIT, 1000 + seed, 100_000) as victim:
                for _ in range(draw.randrange(1, 8)):
                    assert line(victim) == "turn"
                kill(victim)  # in the middle of its next turn
        assert len(finish(steady)) == 3
        assert disk_use(tmp_path) <= account(tmp_path)
    asyncio.run(read_all(tmp_path))
    assert files(tmp_path, "fills") == []
    assert disk_use(tmp_path) <= min(LIMIT, account(tmp_path))


@pytest.mark.parametrize("end", ["answered", "killed"])
def test_processes_that_want_the_same_block(tmp_path: Path, end: str) -> None:
    """One process downloads it while the others wait; if it is killed, another takes over, and nothing is left."""
    size, block = len(content(1, 0) * 20), 1 << 20
    with ExitStack() as stack:
        first = stack.enter_context(started("part", tmp_path, block + 5, 10))
        assert line(first) == f"range {block} {block}"
        ranges = [(block + 100, 100), (2 * block - 1, 2)]  # no process reads the second range's other block yet
        later = [stack.enter_context(started("part", tmp_path, *each)) for each in ranges]
        assert line(later[1]) == f"range {2 * block} {size - 2 * block}"
        go_on(later[1])
        if end == "killed":
            kill(first)
            ready, _, _ = select.select([each.stdout for each in later if each.stdout], [], [], PATIENCE_S)
            heir = next(each for each in later if each.stdout is ready[0])
            assert line(heir) == f"range {block} {block}"
            go_on(heir)
        else:
            heir = None
            go_on(first)
            assert finish(first) == ["right", "0", "1"]
        for missed, process in enumerate(later):
            took_over = process is heir
            assert finish(process) == ["right", str(int(not took_over)), str(missed + took_over)]
    assert files(tmp_path, "fills") == []
    assert sorted(file.stat().st_size > 1000 for file in files(tmp_path, "objects")) == [False, True, True]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_uses_the_cache(tmp_path: Path) -> None:
    """A transport in use works in a forked child; a stream in progress remains the parent's, and is cached."""
    data = content(2, 0) * 9

    async def use() -> None:
        async with transport:
            assert await transport.read("b") == data
            assert await transport.read("b") == data
            assert transport.cache_counts.hits == 2  # blocks

    async with CachedTransport(MemoryTransport({"a": data, "b": data}), "memory://", tmp_path) as transport:
        async with aclosing(transport.stream("a", chunk_size=1000)) as chunks:
            found = [await anext(chunks)]
            child = fork(lambda: asyncio.run(use()))
            await asyncio.to_thread(child.wait)
            found += await drain(chunks)
        assert b"".join(found) == data
        assert await transport.read("a") == await transport.read("b") == data
        assert transport.cache_counts.hits == 4
    assert len(files(tmp_path, "objects")) == 6  # each object's two blocks, and its size
    assert files(tmp_path, "fills") == []
