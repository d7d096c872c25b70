"""Worker threads: errors, hung calls, and ends of epochs and programs."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from asyncloader import DataLoader, Recovery
from asyncloader.errors import NoEffectWarning, WorkerDied
from asyncloader.workers.link import Bell
from tests.helpers.datasets import Numbers
from tests.helpers.running import PATIENCE_S, run_script
from tests.helpers.sealed import THREADED, Sealed, epoch
from tests.helpers.seeded_runs import Stepwise

KINDS = pytest.mark.parametrize("kind", ["sync", "asyncio", "uvloop"])

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@KINDS
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, KeyError])
@pytest.mark.parametrize("at", ["sample", "start"])
def test_every_error_of_the_users_code_is_an_answer(kind: str, error: type[BaseException], at: str) -> None:
    """Whatever a dataset or `worker_init_fn` raises in its thread, the consumer gets it, and the worker goes on."""

    def fail(number: int) -> Any:
        if number == 1:
            raise error("this number")
        return number

    init = fail if at == "start" else None
    dataset = Numbers(4) if at == "start" else Sealed(fail, 4)
    with Stepwise(kind, dataset, worker_init_fn=init, **THREADED) as run:
        run.begin()
        assert int(torch.as_tensor(run.step()).flatten()[0]) == 0
        with pytest.raises(KeyError if error is KeyError else RuntimeError, match="this number"):
            run.step()
        run.step()
        if at == "start":
            with pytest.raises(KeyError if error is KeyError else RuntimeError, match="this number"):
                run.step()
        else:
            run.step()
        assert run.rest() == []


@KINDS
def test_a_hung_thread_is_given_up_and_replaced(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says that it goes on. The batches are those of an undisturbed run, and the hung call's is dropped."""
    hold, calls = threading.Event(), list[threading.Thread]()

    def sample(index: int) -> int:
        if index == 5 and not calls:
            calls.append(threading.current_thread())
            assert hold.wait(PATIENCE_S)
        return index

    try:
        options: dict[str, Any] = {**THREADED, "seed": 1, "recovery": Recovery(worker_timeout=0.3)}
        got = epoch(kind, Sealed(sample), **options)
        assert [int(batch) for batch in got] == list(range(24))
        assert calls[0].is_alive()
        assert re.search(r"worker \d \(a thread\) is replaced: The loader gave it up: .* cannot be killed", caplog.text)
    finally:
        hold.set()
    calls[0].join(PATIENCE_S)
    assert not calls[0].is_alive()


def test_a_hung_thread_without_replacement_is_an_error_that_shows_its_stack() -> None:
    """A thread cannot be killed, and the error says so."""
    hold, threads = threading.Event(), list[threading.Thread]()

    def hang_here(index: int) -> int:
        if index == 2:
            threads.append(threading.current_thread())
            assert hold.wait(PATIENCE_S)
        return index

    recovery = Recovery(worker_timeout=0.3)
    try:
        with (
            pytest.warns(NoEffectWarning),
            pytest.raises(
                WorkerDied, match=r"(?s)worker \d, a thread, is lost\.\nIt was here:.*hang_here.*cannot be killed"
            ),
        ):
            epoch("sync", Sealed(hang_here), recovery=recovery, **THREADED)
    finally:
        hold.set()
    threads[0].join(PATIENCE_S)


def test_a_timeout_reports_the_stacks() -> None:
    """``timeout=`` names the call in which a worker thread is."""
    hold = threading.Event()

    def wait_there(index: int) -> int:
        hold.wait(1)
        return index

    with DataLoader[Any](Sealed(wait_there), timeout=0.3, **THREADED) as loader:
        with pytest.raises(RuntimeError, match="wait_there"):
            next(iter(loader))
        hold.set()


@KINDS
@pytest.mark.parametrize("end", ["break", "close", "error"])
def test_threads_end_with_the_epoch(kind: str, end: str) -> None:
    """After a break in the middle, a close or an error in the body no thread and no batch is left: see conftest.py."""
    with Stepwise(kind, Sealed(lambda n: torch.zeros(1000) + n), **THREADED) as run:
        run.begin()
        run.take(3)
        assert [each for each in threading.enumerate() if each.name.startswith("asyncloader-worker")]
        if end == "close":
            run.call((run.loader if kind == "sync" else run.iterator).close)
        elif end == "error":
            with pytest.raises(ZeroDivisionError):
                raise ZeroDivisionError("in the body")
        run.iterator = None
    gc.collect()
    assert not [each for each in threading.enumerate() if each.name.startswith("asyncloader-worker")]


def test_persistent_threads_serve_the_next_epoch() -> None:
    """The same threads, also after an epoch that was left early."""
    seen: set[int] = set()

    def sample(index: int) -> int:
        seen.add(threading.get_ident())
        return index

    with DataLoader[Any](Sealed(sample), persistent_workers=True, **THREADED) as loader:
        for taken in (3, None, 5, None):
            for number, batch in enumerate(loader):
                assert int(batch) == number
                if number == taken:
                    break
    assert len(seen) == 2


@pytest.mark.parametrize("line", range(1, 9))
def test_an_answer_while_the_next_epoch_begins_in_another_loop(line: int) -> None:
    """Before any line of `ring` the loop of the epoch before may be left for a new one, which hears all later rings."""
    bell, before, after = Bell(), asyncio.new_event_loop(), asyncio.new_event_loop()
    heard: list[int] = []

    def answer() -> None:
        bell.hush()
        heard.append(1)

    def run(loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(loop.stop)
        loop.run_forever()

    def begin_the_next() -> None:
        bell.detach()
        before.close()
        bell.attach(after, answer)
        run(after)

    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not Bell.ring.__code__:
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            begin_the_next()
        return trace

    bell.attach(before, answer)
    run(before)
    sys.settrace(trace)
    bell.ring()
    sys.settrace(None)
    if left > 0:  # it has fewer lines
        begin_the_next()
    known = len(heard)
    bell.ring()
    run(after)
    assert len(heard) > known
    after.close()


def test_the_programs_settings_are_left_alone() -> None:
    """torch's number of threads and the collector's settings are those of before, in this thread and in new ones."""
    before = torch.get_num_threads(), gc.get_threshold()
    inside: list[int] = []

    def sample(index: int) -> int:
        inside.append(torch.get_num_threads())
        return index

    with DataLoader[Any](Sealed(sample), seed=1, **THREADED) as loader:
        for _ in loader:
            found: list[int] = []
            other = threading.Thread(target=lambda into=found: into.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert found == [before[0]]
    after = torch.get_num_threads(), gc.get_threshold()
    assert after == before
    if sys.platform.startswith("linux"):
        assert set(inside) == {1}


SCRIPT = """
import os, sys, threading, time
import torch
from torch.utils.data import Dataset, get_worker_info
from asyncloader import DataLoader

class Slow(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.001)
        return index

loader = DataLoader(Slow(), num_workers=2, workers="threads", batch_size=2, seed=1)
batches = iter(loader)
next(batches)
"""
ENDS = {
    "exit": "print('done')",
    "sys.exit": "print('done'); sys.exit(0)",
    "fork": """
pid = os.fork()
if not pid:
    assert get_worker_info() is None
    assert len(list(DataLoader(Slow(), batch_size=100, num_workers=2, workers="threads"))) == 10
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert sum(1 for _ in batches) == 499
print('done')
""",
    # The handler: a shell starts jobs in the background with SIGINT ignored, and programs inherit that.
    "Ctrl-C": """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        for _ in loader:
            pass
except KeyboardInterrupt:
    print('done')
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_while_threads_work(tmp_path: Path, end: str) -> None:
    """At once, without a word, with exit code 0; a child that is forked beside them has none of them."""
    began = time.perf_counter()
    ended = run_script(tmp_path, SCRIPT + ENDS[end])
    assert (ended.stdout, ended.stderr, ended.returncode) == ("done\n", "", 0)
    assert time.perf_counter() - began < PATIENCE_S
