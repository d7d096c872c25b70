"""Programs that exit with live iterators: they exit with their own exit code and print nothing.

Finalizers of the remaining objects do nothing. From Python 3.13 on, a daemon thread never runs again once the
interpreter is finalizing; before, it is ended wherever it stands.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.running import run_script
from tests.pairwise import quickly

PREAMBLE = """
import asyncio, sys, threading, torch
from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions

class Plain(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.full((3,), index)

class Async(Plain):
    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return torch.full((3,), index)
    async def __aenter__(self):
        return self
    async def __aexit__(self, *_):
        await asyncio.sleep(0)

class Stream:
    async def __aiter__(self):
        for index in range(1000):
            await asyncio.sleep(0)
            yield index

class Sampler:
    async def __aiter__(self):
        for index in range(1000):
            await asyncio.sleep(0)
            yield index

def negated(batch):
    return -batch

alive = []

def begin(dataset, **options):
    for _ in range(2):  # one loader after the other, and two iterators of one
        loader = DataLoader(dataset, **options)
        for _ in range(2):
            alive.append(iter(loader))
            next(alive[-1])

async def begin_async(dataset, **options):
    alive.append(aiter(AsyncDataLoader(dataset, **options)))
    await anext(alive[-1])

"""

SOURCES = {
    "plain dataset": "Plain()",
    "async dataset": "Async()",
    "async stream": "Stream()",
    "async sampler": "Plain(), sampler=Sampler()",
    "threads": "Plain(), concurrency=2",
    "device stage": "Plain(), device='cpu', device_options=DeviceOptions(device_transform=negated)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", quickly(SOURCES, "plain dataset", "async dataset", "async stream", "device stage"))
def test_iterators_are_alive_at_the_end(source: str, workers: int, tmp_path: Path) -> None:
    """Iterators of `for` and of ``async for`` are alive, with batches ready, being made, or read ahead."""
    arguments = f"{SOURCES[source]}, num_workers={workers}"
    main = f"""
if __name__ == "__main__":
    begin({arguments})
    asyncio.run(begin_async({arguments}))
    print("done")
"""
    # One dataset in interpreters of their own: forks exit in the same way.
    done = run_script(tmp_path, PREAMBLE + main, fresh=source == "plain dataset")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


ODD_ENDS = {
    "a thread's iterator": """
thread = threading.Thread(target=begin, args=(Async(),))
thread.start()
thread.join()
""",
    "collected by the interpreter's end": """
begin(Async())
cycle = [alive.pop()]
cycle.append(cycle)
del cycle
alive.append(sys)
""",
    "a loop that stands still": """
loader = DataLoader(Async())
alive.append(iter(loader))
next(alive[0])
loader._asyncloader_state.bridge.call_soon(threading.Event().wait)
""",
    "dropped by who holds what the loop waits for": """
lock, waiting = threading.Lock(), threading.Event()
def wait():
    waiting.set()
    with lock:
        pass
loader = DataLoader(Async())
batches = iter(loader)
next(batches)
with lock:
    loader._asyncloader_state.bridge.call_soon(wait)
    waiting.wait()
    del batches
""",
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "end", quickly(ODD_ENDS, "a loop that stands still", "dropped by who holds what the loop waits for")
)
def test_odd_ends(end: str, tmp_path: Path) -> None:
    """The loop's thread may not respond, at exit or when an iterator is dropped: this delays nothing for long."""
    done = run_script(tmp_path, PREAMBLE + ODD_ENDS[end] + "\nprint('done')\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_daemon_thread_is_in_next(workers: int, tmp_path: Path) -> None:
    """It gets LoaderClosed, and ends without a word, like any daemon thread."""
    main = f"""
waits = threading.Event()
class Waiting(Async):
    async def __getitem__(self, index):
        if index == 1:
            waits.set()
            await asyncio.sleep(3600)
        return index

def consume():
    for _ in DataLoader(Waiting(), batch_size=None, num_workers={workers}, workers="threads" if {workers} else None):
        pass

import atexit
thread = threading.Thread(target=consume, daemon=True)
atexit.register(thread.join)  # called after the hook that closes loaders, which is registered later
thread.start()
waits.wait()
print('done')
"""
    done = run_script(tmp_path, PREAMBLE + main)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
