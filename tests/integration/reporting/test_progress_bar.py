"""The progress bar of both loaders, in a terminal and without."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import sys
import termios
import textwrap
from collections.abc import Iterator
from contextlib import aclosing
from math import inf
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.epoch.async_inline import AsyncInlineIterator
from asyncloader.epoch.sync_inline import SyncInlineIterator
from asyncloader.errors import LoaderClosed
from asyncloader.progress_bar import _CountedAsyncSteps, _CountedSteps, _Words
from asyncloader.telemetry.statistics import Statistics
from tests import script_server
from tests.helpers.datasets import Numbers
from tests.helpers.running import PATIENCE_S, environment

HEAD = """
    import asyncio, os, sys, threading, time
    from asyncloader import AsyncDataLoader, DataLoader
    from tests.helpers.datasets import Numbers
"""
SYNC = """
    with DataLoader(Numbers(60), batch_size=2, num_workers={workers}, seed=1) as loader:
        bar = loader.progress()
        assert len(bar) == 30
        before = loader.state_dict()
        begun = time.perf_counter()
        for number, batch in enumerate(bar):
            time.sleep(0.02)
        print(number, time.perf_counter() - begun)
        for batch in bar:
            break
        loader.load_state_dict({{**before, "step": 20}})
        loader.skip([22, 24])
        print(sum(1 for _ in bar))
    print(threading.active_count())
"""
ASYNC = """
    async def main():
        async with AsyncDataLoader(Numbers(60), batch_size=2, num_workers={workers}, seed=1) as loader:
            bar = loader.progress()
            before = loader.state_dict()
            begun, number = time.perf_counter(), -1
            async for batch in bar:
                number += 1
                await asyncio.sleep(0.02)
            print(number, time.perf_counter() - begun)
            async for batch in bar:
                break
            loader.load_state_dict({{**before, "step": 20}})
            loader.skip([22, 24])
            print(len([1 async for _ in bar]))

    asyncio.run(main())
    print(threading.active_count())
"""


def in_terminal(program: str, folder: Path) -> tuple[list[str], str]:
    """Run a program whose standard error is a terminal. Returns the lines of its standard output, and the terminal's
    text.
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(HEAD) + "if __name__ == '__main__':\n" + program)
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 160))
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = script_server.start([sys.executable, str(script)], env=environment(), stderr=theirs, cwd=folder)
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = terminal.read(1 << 16)
            except OSError:  # Linux: the last process has closed it
                break
            if not data:
                break
            shown += data
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, shown.decode()
    return output.splitlines(), shown.decode()


@pytest.mark.parametrize(
    ("program", "workers"), [(SYNC, 0), (ASYNC, 2), pytest.param(SYNC, 2, marks=pytest.mark.thorough)]
)
def test_a_bar_in_a_terminal(tmp_path: Path, program: str, workers: int) -> None:
    """It counts all steps, shows rate and waiting, is drawn ten times a second at most, closes when the loop is left,
    begins where the loader resumes, counts steps that are left out, and leaves no thread.
    """
    pytest.importorskip("tqdm")
    lines, shown = in_terminal(program.format(workers=workers), tmp_path)
    (number, seconds), resumed, threads = lines[0].split(), lines[1], lines[2]
    assert (number, resumed, threads) == ("29", "8", "1")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "epoch 0" in text
    assert re.search(r"30/30.*batch", text)
    assert re.search(r"waits \d+%", text)
    first = text.partition("30/30")[0]
    assert first.count("epoch 0") <= 10 * float(seconds) + 4
    assert re.search(r"\b1/30", text)
    assert "30/30" in text.rpartition("epoch")[2], "eight steps: from the twentieth on, without two of them"


class Lengthless(IterableDataset[int]):
    """A stream whose length is not to be asked for: that may mean to read from a store."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __len__(self) -> int:
        raise AssertionError


def test_nothing_is_shown_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Then the loader's own iterator is returned, which costs nothing, and nothing is written."""
    loader = DataLoader(Numbers(4), batch_size=2)
    iterator = iter(loader.progress())
    assert type(iterator) is SyncInlineIterator
    assert len(list(iterator)) == 2
    assert type(aiter(AsyncDataLoader(Numbers(4)).progress())) is AsyncInlineIterator
    assert next(iter(DataLoader(Lengthless(), batch_size=None).progress())) == 1
    with pytest.raises(TypeError, match="read with 'async for'"):
        iter(AsyncDataLoader(Numbers(4)).progress())
    assert capfd.readouterr() == ("", "")


class Bar:
    """Keeps the steps that were counted, and draws as tqdm does when it is closed."""

    def __init__(self, *, judges: bool = True) -> None:
        def diagnose() -> Any:
            raise AssertionError("no verdict may be asked for")

        self.steps, self.closed = 0, False
        self.words = _Words(Statistics(), diagnose)
        self.words.judge_at = 0.0 if judges else inf

    def update(self) -> None:
        self.steps += 1

    def close(self) -> None:
        self.words.now()
        self.closed = True


def test_a_cancelled_call_does_not_close_the_bar() -> None:
    """The next call goes on."""

    class Waits:
        def __init__(self) -> None:
            self.go = asyncio.Event()

        async def __anext__(self) -> int:
            await self.go.wait()
            return 1

    async def run() -> None:
        bar, waits = Bar(), Waits()
        batches = _CountedAsyncSteps(waits, bar, bar.words)
        call = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not bar.closed
        waits.go.set()
        assert await anext(batches) == 1
        assert bar.steps == 1

    asyncio.run(run())


def test_a_bar_that_is_dropped_asks_for_no_verdict() -> None:
    """The collector may drop it while its thread holds the lock of the figures, for which a verdict would wait."""
    bar = Bar()
    next(_CountedSteps(iter("ab"), bar, bar.words))
    assert (bar.steps, bar.closed) == (1, True)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_closed(workers: int) -> None:
    """By `aclose` of the bar's iterator, as by that of the loader's own: workers and bar have ended then, and the
    next epoch is whole.
    """

    async def run() -> None:
        bar = Bar(judges=False)
        async with AsyncDataLoader[Any](Numbers(8), batch_size=2, num_workers=workers, seed=1) as loader:
            async with aclosing(_CountedAsyncSteps(aiter(loader), bar, bar.words)) as batches:
                await anext(batches)
            assert (bar.steps, bar.closed) == (1, True)
            assert not multiprocessing.active_children()
            with pytest.raises(LoaderClosed):
                await anext(batches)
            await batches.aclose()
            assert len([batch async for batch in loader]) == 4

    asyncio.run(run())
