"""The program's signal handlers stay in the main process; workers that are left stop soon, when asked to.

torch's workers do not run the program's SIGTERM handler either: they set their own handler, in C.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import multiprocessing.util
import os
import re
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, WorkerDied
from asyncloader.workers import shutdown
from tests.helpers.running import KINDS, PATIENCE_S, Deaths, run_async
from tests.helpers.stuck import StuckAt, Told

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

CRASHES = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
OURS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM, signal.SIGXCPU]


def caught() -> set[int]:
    """The signals for which this process has a handler, according to the kernel."""
    mask = int(re.findall(r"^SigCgt:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


class Signals(Dataset[Any]):
    """Each sample describes how signals are handled in its process."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "python": {number for number in signal.valid_signals() if callable(signal.getsignal(number))},
            "kernel": {*caught(), *map(int, CRASHES)},
            "wakes": signal.set_wakeup_fd(-1),
            "blocked": set(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "ignored": {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN},
        }


def sets_handlers(worker: int) -> None:
    """Set the worker's own handlers."""
    del worker
    faulthandler.register(signal.SIGUSR2)
    signal.signal(signal.SIGUSR1, lambda *_: None)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Handlers in Python, in C, and by `faulthandler`; gives the signals whose handlers were called."""
    calls: list[int] = []
    before = {number: signal.getsignal(number) for number in OURS}
    libc = ctypes.CDLL(None)
    in_c = ctypes.CFUNCTYPE(None, ctypes.c_int)(calls.append)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: calls.append(number))
    libc.signal(ctypes.c_int(signal.SIGVTALRM), in_c)
    faulthandler.register(signal.SIGUSR2, chain=False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    libc.signal(ctypes.c_int(signal.SIGXCPU), in_c)  # like a library, unknown to Python
    yield calls
    faulthandler.unregister(signal.SIGUSR2)
    for number, handler in before.items():
        signal.signal(number, handler)


def one(batch: list[Any]) -> Any:
    return batch[0]


@pytest.mark.spawns
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_begin_with_default_handlers(handled: list[int], method: str) -> None:
    """In a worker neither Python nor the kernel has a handler of the program, and no loop is woken; signals that the
    program ignores stay ignored.
    """

    async def load() -> list[Any]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, handled.append, 0)
        async with AsyncDataLoader[Any](
            Signals(), num_workers=1, batch_size=1, collate_fn=one, multiprocessing_context=method
        ) as loader:
            return [found async for found in loader]

    for found in run_async(load()):
        assert not found["python"]
        assert found["wakes"] == -1
        assert not found["blocked"]
        assert found["ignored"] >= {signal.SIGINT, signal.SIGPIPE}
        if method != "forkserver":  # another test may have started its server
            assert signal.SIGHUP in found["ignored"]
        (stacks,) = found["kernel"] - {*CRASHES}  # the loader's own: see `stacks.py`
        assert stacks > signal.SIGRTMIN
    assert not handled


def test_ignored_signals_stay_ignored(handled: list[int]) -> None:
    """A signal stays ignored also where a library has set a handler since, which the worker does not have."""
    loader = DataLoader[Any](Signals(), num_workers=1, collate_fn=one, multiprocessing_context="fork")
    for found in loader:
        assert signal.SIGXCPU in found["ignored"]
        assert signal.SIGXCPU not in found["kernel"]
    assert not handled


def test_worker_init_fn_sets_handlers(handled: list[int]) -> None:
    """Also a handler of `faulthandler`, which had a handler for the same signal before the fork."""
    loader = DataLoader[Any](
        Signals(), num_workers=1, collate_fn=one, multiprocessing_context="fork", worker_init_fn=sets_handlers
    )
    for found in loader:
        assert found["python"] == {signal.SIGUSR1}
        assert found["kernel"] >= {signal.SIGUSR1, signal.SIGUSR2}
    assert not handled


def test_blocked_signals_stay_blocked(handled: list[int]) -> None:
    """Workers have the mask of the thread that starts them, as with any fork; the thread's mask does not change."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        loader = DataLoader[Any](Signals(), num_workers=1, collate_fn=one, multiprocessing_context="fork")
        assert [found["blocked"] for found in loader] == [{*before, signal.SIGUSR1}] * 2
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {*before, signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert not handled


class SignalsItself:
    """While it exists, every child of `multiprocessing` sends itself a signal before its own code runs."""

    def __init__(self, wrote: int) -> None:
        multiprocessing.util.register_after_fork(self, SignalsItself.act)
        signal.signal(signal.SIGTERM, lambda *_: os.write(wrote, b"!"))

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("handled")
def test_signal_to_a_process_that_is_not_a_worker_yet() -> None:
    """The program's handler does not run in the child: the signal ends it."""
    read, wrote = os.pipe()
    try:
        itself = SignalsItself(wrote)
        loader = DataLoader[Any](Signals(), num_workers=1, collate_fn=one, multiprocessing_context="fork")
        with pytest.raises(WorkerDied) as caught:
            list(loader)
        del itself
        assert caught.value.exitcode == -signal.SIGTERM
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(wrote)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_early_runs_no_handler(kind: str, handled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in a long read is sent SIGTERM, and ends: the handler runs in neither process, by Python or by loop."""
    monkeypatch.setattr(shutdown, "_ASK_SECONDS", 0.1)

    async def leave(told: Told) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, handled.append, -1)
        loader = AsyncDataLoader[Any](StuckAt("asleep", told, 1), num_workers=1, multiprocessing_context="fork")
        batches = aiter(loader)
        await anext(batches)
        deaths = Deaths(int(pid) for pid in await asyncio.to_thread(told.lines, 1))
        await loader.aclose()
        assert deaths.ended()
        deaths.close()
        await asyncio.sleep(0)
        loop.remove_signal_handler(signal.SIGTERM)

    with Told() as told:
        if kind == "sync":
            loader = DataLoader[Any](StuckAt("asleep", told, 1), num_workers=1, multiprocessing_context="fork")
            batches = iter(loader)
            next(batches)
            told.lines(1)
            loader.close()
        else:
            run_async(leave(told), kind)
    assert not handled


# --------------------------------------------------------------------------------------------------- the queue


def await_leaving(told: Told, text: str) -> None:
    """In a worker: send this text, and wait until the main process has closed its end of one of the sockets here."""
    poll = select.poll()
    for fd in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                poll.register(fd, select.POLLRDHUP)
    for fd, _ in poll.poll(0):
        poll.unregister(fd)
    told.tell(text)
    poll.poll(PATIENCE_S * 1000)


class Left(Dataset[Any]):
    """Each sample but the first sends its index, and then lasts until the worker is left."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index:
            await_leaving(self.told, str(index))
        return index


def close(loader: DataLoader[Any], batches: list[Any]) -> None:
    del batches
    loader.close()


def drop(loader: DataLoader[Any], batches: list[Any]) -> None:
    del loader
    batches.clear()


@pytest.mark.parametrize("padding", [0, 5_000], ids=["short tasks", "tasks that fill the socket"])
@pytest.mark.parametrize("end", [close, drop])
def test_queued_tasks_are_not_begun(end: Callable[[Any, Any], None], padding: int) -> None:
    """A worker that is left finishes its current batch, and begins none of the tasks that wait for it."""
    sampler = [[number, *[0] * padding] for number in range(64)]
    with Told() as told:
        options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 32, "multiprocessing_context": "fork"}
        loader = DataLoader[Any](Left(told), batch_sampler=sampler, collate_fn=one, **options)
        batches = [iter(loader)]
        assert next(batches[0]) == 0
        assert told.lines(1) == ["1"]
        end(loader, batches)
        told.tell("end")
        assert told.lines(1) == ["end"]
