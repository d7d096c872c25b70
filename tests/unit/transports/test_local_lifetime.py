from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from asyncloader.transports import LocalTransport


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 40)
    return tmp_path


async def hold_threads(transport: LocalTransport, free: threading.Event) -> list[asyncio.Task[bool]]:
    """Keep all threads of `transport` busy until `free` is set."""
    begun = threading.Barrier(transport.threads + 1)

    def call() -> bool:
        begun.wait()
        return free.wait(30)  # a bound for tests that fail; the others release it

    tasks = [asyncio.create_task(transport._pool.run(call)) for _ in range(transport.threads)]
    await asyncio.to_thread(begun.wait)
    return tasks


async def test_read_is_cancelled_in_the_queue_of_the_threads(root: Path) -> None:
    """A read that waits for a thread can be cancelled; the others are served."""
    free = threading.Event()
    async with LocalTransport(root, threads=2) as transport:
        held = await hold_threads(transport, free)
        reads = [asyncio.create_task(transport.read("a.bin")) for _ in range(9)]
        await asyncio.sleep(0)
        reads[4].cancel()
        with pytest.raises(asyncio.CancelledError):
            await reads[4]
        free.set()
        await asyncio.gather(*held)
        sizes = [len(data) for data in await asyncio.gather(*reads[:4], *reads[5:])]
        assert sizes == [10240] * 8


# --- open files


async def test_open_gives_a_file_of_aiofiles(root: Path) -> None:
    """The file can read, seek and give its position, and is closed when the block ends."""
    async with LocalTransport(root) as transport:
        async with transport.open("a.bin") as file:
            assert await file.read(3) == b"\x00\x01\x02"
            assert await file.seek(-1, os.SEEK_END) == 10239
            assert await file.read() == b"\xff"
            assert await file.tell() == 10240
            assert not file.closed
        assert file.closed


async def test_open_file_is_closed_when_its_task_is_cancelled(root: Path) -> None:
    """A task cancelled in the block, and again in its end, leaves no descriptor: the leak check verifies that."""
    free = threading.Event()
    opened = asyncio.Event()

    async def use() -> None:
        async with transport.open("a.bin") as file:
            opened.set()
            await file.read(1)
            await asyncio.Event().wait()

    async with LocalTransport(root, threads=1) as transport:
        using = asyncio.create_task(use())
        await opened.wait()
        held = await hold_threads(transport, free)
        using.cancel()  # its close has to wait for the thread
        await asyncio.sleep(0)
        using.cancel()  # which ends that wait
        with pytest.raises(asyncio.CancelledError):
            await using
        free.set()
        await asyncio.gather(*held)


# --- other processes


def test_pickle_keeps_root_and_threads(root: Path) -> None:
    """A worker's copy has the same configuration."""
    copy = pickle.loads(pickle.dumps(LocalTransport(root, threads=3)))
    assert (copy.root, copy.threads) == (str(root), 3)


def _read_in_child(transport: LocalTransport, answer: Connection) -> None:
    async def read() -> int:
        async with transport:
            return len(await transport.read("a.bin"))

    answer.send(asyncio.run(read()))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_transport_used_before_a_fork_works_in_the_child(root: Path) -> None:
    """The parent's threads do not exist in the child, which starts its own; the parent's keep working."""
    with asyncio.Runner() as runner:
        transport = LocalTransport(root, threads=1)
        assert len(runner.run(transport.read("a.bin"))) == 10240
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(transport, theirs))
        child.start()
        theirs.close()
        try:
            assert ours.poll(30), "the child hangs"
            assert ours.recv() == 10240
        finally:
            child.kill()
            child.join()
            child.close()
            ours.close()
        assert len(runner.run(transport.read("a.bin"))) == 10240
        runner.run(transport.aclose())


def test_one_transport_in_one_loop_after_another(root: Path) -> None:
    """A `LocalTransport` can be used after the loop of its first use."""
    transport = LocalTransport(root)
    for _ in range(2):
        assert asyncio.run(transport.size("a.bin")) == 10240
    asyncio.run(transport.aclose())
    assert repr(transport) == f"<LocalTransport {str(root)!r} threads={transport.threads} closed>"
