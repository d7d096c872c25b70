"""A trainer forks in the middle of an epoch, through other libraries, in other threads, and either process exits:
nothing is freed twice, and no process waits for ever. See also test_fork_safety.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from tests.helpers.datasets import Numbers, Sized
from tests.helpers.forking import AT, Child, Here, at, epoch, expected, fork, value
from tests.helpers.running import BOTH, PATIENCE_S, Deaths, run_script, start_script
from tests.pairwise import quickly

# Python 3.12 and later warn of a fork in a process with several threads, which is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

METHODS = ["fork", "spawn", "forkserver"]
# ------------------------------------------------------------------------------------------- multiprocessing


def _reads(held: list[Any], numbers: list[int]) -> None:
    assert [value(batch) for batch in held] == numbers
    assert [int(batch[0, 0]) for batch in DataLoader[Any](Numbers(4), num_workers=1)] == [0, 100, 200, 300]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", quickly(METHODS, "fork", "spawn"))
def test_multiprocessing_children(kind: str, method: str) -> None:
    """A `Process` is started and joined in the loop's body; it reads batches given as arguments, and its own loader."""
    held: list[Any] = []

    def starts(here: Here) -> None:
        held.append(here.batch)
        numbers = [value(batch) for batch in held]
        context: Any = multiprocessing.get_context(method)
        batches = held if method == "fork" else [batch.clone() for batch in held]
        process = context.Process(target=_reads, args=(batches, numbers))
        process.start()
        process.join(PATIENCE_S)
        hangs = process.is_alive()
        process.kill()
        process.join()
        assert not hangs
        assert process.exitcode == 0
        process.close()

    assert epoch(kind, at((1,) if method != "fork" else AT, starts)) == expected(40)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("other", ["torch", "ours"])
def test_another_loaders_workers_are_forked_in_the_loop(kind: str, other: str) -> None:
    """A validation loader, torch's or ours, is read in the middle of training: both loaders give all their batches, and
    the workers forked for validation do not delay the end of ours.
    """
    others: list[Any] = []

    def validates(_: Here) -> None:
        make: Any = torch.utils.data.DataLoader if other == "torch" else DataLoader
        loader = make(Numbers(8), num_workers=2, persistent_workers=True)
        others.append((loader, iter(loader)))
        for _epoch in range(2):
            assert [int(batch[0, 0]) for batch in loader] == [100 * i for i in range(8)]

    assert epoch(kind, at((2,), validates)) == expected(40)  # our workers have ended although those of validation live
    ((loader, batches),) = others
    assert [int(batch[0, 0]) for batch in loader] == [100 * i for i in range(8)]
    others.clear()
    del loader, batches


# ------------------------------------------------------------------------------------------- threads


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_forks_in_another_thread(kind: str) -> None:
    """A thread forks again and again while the loop runs; each child deletes its copies, wherever the other threads
    were at that moment, with whatever lock held.
    """
    over = threading.Event()
    failures: list[BaseException] = []
    seen: list[Any] = []
    count = 0

    def child() -> None:
        seen.clear()
        gc.collect()

    def forks() -> None:
        nonlocal count
        try:
            while not over.is_set():
                fork(child).wait()
                count += 1
        except BaseException as error:
            failures.append(error)

    def body(here: Here) -> None:
        seen[:] = [here.batch, here.batches, here.loader]

    thread = threading.Thread(target=forks)
    thread.start()
    try:
        for _ in range(3):
            assert epoch(kind, body, n=150) == expected(150)
    finally:
        over.set()
        thread.join()
        seen.clear()
    assert not failures
    assert count


def test_a_fork_in_a_thread_that_closes_the_loader() -> None:
    """The child's only thread is the forking thread, which closes the loader that another thread was iterating."""
    children: list[Child] = []

    def body(here: Here) -> None:
        thread = threading.Thread(target=lambda: children.append(fork(here.loader.close)))
        thread.start()
        thread.join()
        children.pop().wait()

    assert epoch("sync", at(AT, body)) == expected(40)


# ------------------------------------------------------------------------------------------- exits

HEAD = """
    import asyncio, atexit, ctypes, gc, os, select, signal, subprocess, sys, threading
    import torch
    from asyncloader import AsyncDataLoader, DataLoader

    def ends(child):
        fd = os.pidfd_open(child)
        if not select.select([fd], [], [], 20)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

EXITS = {
    "sync": """
    batches = iter(DataLoader(torch.arange(100), num_workers=2))
    held = [next(batches) for _ in range(3)]
    child = os.fork()
    if not child:
        atexit.register(os.write, 1, b"hook ")
        sys.exit(3)
    print(ends(child), [int(b) for b in batches] == list(range(3, 100)))
""",
    "sync, with a loader of its own": """
    loader = DataLoader(torch.arange(100), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if not child:
        atexit.register(os.write, 1, b"hook ")
        again = iter(loader)
        assert int(next(again)) == 0
        sys.exit(3)
    print(ends(child), [int(b) for b in batches] == list(range(1, 100)))
""",
    "async": """
    async def main():
        async with AsyncDataLoader(torch.arange(100), num_workers=2) as loader:
            batches = aiter(loader)
            held = [await anext(batches) for _ in range(3)]
            child = os.fork()
            if not child:
                atexit.register(os.write, 1, b"hook ")
                atexit._run_exitfuncs()
                os._exit(3)
            print(ends(child), [int(b) async for b in batches] == list(range(3, 100)))
    asyncio.run(main())
""",
    "async, between two runs": """
    loader = AsyncDataLoader(torch.arange(100), num_workers=2, persistent_workers=True)
    async def part(n):
        return [int(b) async for b in loader][:n]
    asyncio.run(part(5))
    child = os.fork()
    if not child:
        atexit.register(os.write, 1, b"hook ")
        assert asyncio.run(part(3)) == [0, 1, 2]
        sys.exit(3)
    print(ends(child), asyncio.run(part(100)) == list(range(100)))
    loader.close()
""",
    "in a thread": """
    batches = iter(DataLoader(torch.arange(100), num_workers=2))
    next(batches)
    def work():
        global code
        child = os.fork()
        if not child:
            atexit.register(os.write, 1, b"hook ")
            atexit._run_exitfuncs()
            os._exit(3)
        code = ends(child)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(code, [int(b) for b in batches] == list(range(1, 100)))
""",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXITS)
def test_a_child_that_exits_with_its_hooks(name: str, tmp_path: Path) -> None:
    """The child runs its exit hooks and exits with its own code; the parent's epoch is complete, without output."""
    with start_script(tmp_path, HEAD + EXITS[name]) as running:
        out, err = running.finish()
    assert (out, err, running.process.returncode) == ("hook 3 True\n", "", 0)


HELD = {
    "a forked child": "child = os.fork() or signal.pause()",
    "a program that inherits what it can": 'child = subprocess.Popen(["sleep", "1000"], close_fds=False).pid',
    "a child of C code": "child = ctypes.CDLL(None).fork() or ctypes.CDLL(None).pause()",
    "torch's own workers": """
    others = iter(torch.utils.data.DataLoader(torch.arange(9), num_workers=1, persistent_workers=True))
    child = others._workers[0].pid
    os.kill(child, signal.SIGSTOP)  # else torch's worker ends by itself in some seconds
    """,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HELD)
def test_workers_end_with_the_parent_although_its_child_lives(name: str, tmp_path: Path) -> None:
    """A trainer is killed by SIGKILL while a child holds copies of all its open descriptors: our workers end."""
    body = f"""
    batches = iter(DataLoader(torch.arange(1000), num_workers=2))
    next(batches)
    workers = [worker.pid for worker in batches._workers]
    {HELD[name].strip()}
    print(child, *workers, flush=True)
    signal.pause()
"""
    with start_script(tmp_path, HEAD + body) as running:
        child, *workers = [int(pid) for pid in running.line().split()]
        try:
            with Deaths(workers) as deaths, Deaths([child]) as others:
                os.kill(running.process.pid, signal.SIGKILL)
                deaths.wait()
                assert not others.ended()
        finally:
            os.kill(child, signal.SIGKILL)
        running.finish()


# ------------------------------------------------------------------------------------------- again and again


@pytest.mark.thorough
def test_many_forks_do_not_starve_the_ring() -> None:
    """Forks while batches are held retire slots; the loader continues with views, in a new ring at last."""
    loader = DataLoader[Any](Sized([5000] * 200), num_workers=1)
    seen = []
    for position, batch in enumerate(loader):
        if position % 5 == 0:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        seen.append(int(batch.unique()))
        del batch
    assert seen == [i % 251 for i in range(200)]
    assert loader.stats()["data/ring_copies"] < 100


AFTER_BREAK = """
import multiprocessing
multiprocessing.set_start_method("fork")  # not the default from Python 3.14 on
import os, sys
import psutil
import torch
from asyncloader import DataLoader
loader = DataLoader(torch.arange(100), num_workers=2)
for _ in range(2):
    for batch in loader:
        break
    child = os.fork()
    if child == 0:
        assert [int(b) for b in loader] == list(range(100))
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for batch in loader:
        assert len(psutil.Process().children()) == 2  # the generation before has gone
        break
loader.close()
assert not psutil.Process().children()
print("done")
"""


@pytest.mark.thorough
def test_a_fork_right_after_a_break(tmp_path: Path) -> None:
    """The child reads the loader anew; in the parent the workers of the generation before have ended."""
    done = run_script(tmp_path, AFTER_BREAK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
