"""Shows an epoch's progress in a terminal: steps, rate, share of waiting, and what bounds the run.

Data path: loader -> [progress_bar] -> the user. For ``loader.progress()``.

A bar of tqdm, or of rich where only that is installed. It is drawn from the consumer's thread, ten times a second at
most; there is no thread, and a batch costs one call and a comparison of times in between. Without a terminal or without
either package the loader's own iterator is returned.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from math import inf
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from asyncloader.telemetry.diagnosis import Diagnosis
from asyncloader.telemetry.statistics import Statistics

B = TypeVar("B")

_DRAW_S = 0.1
_JUDGE_S = 5.0  # between two verdicts, which take milliseconds
_WINDOW_S = 3.0  # the least time that the share of waiting is of


class EpochProgress(Generic[B]):
    """The loader's batches, by ``for`` or ``async for`` as the loader is read. Each iteration is an epoch with a bar of
    its own. Made by ``loader.progress()``.

    Args:
        loader: the loader.
        statistics: of the loader.
        steps_before: returns the number of steps that the newest iterator leaves out: it resumed behind them.
        title: returns the newest iterator's title.
        diagnose: judges the run.
        unit: the name of a step.
    """

    def __init__(
        self,
        loader: Any,
        statistics: Statistics,
        steps_before: Callable[[], int],
        title: Callable[[], str],
        diagnose: Callable[[], Diagnosis],
        unit: str = "batch",
    ) -> None:
        self._loader = loader
        self._statistics = statistics
        self._steps_before, self._title = steps_before, title
        self._diagnose = diagnose
        self._unit = unit

    def __len__(self) -> int:
        """Batches in an epoch. TypeError when the sampler or dataset has no length."""
        return len(self._loader)

    def __iter__(self) -> Iterator[B]:
        """Begin an epoch of a `DataLoader`."""
        shown: Iterator[B] = self._shown(iter(self._loader), _CountedSteps)
        return shown

    def __aiter__(self) -> AsyncIterator[B]:
        """Begin an epoch of an `AsyncDataLoader`."""
        shown: AsyncIterator[B] = self._shown(aiter(self._loader), _CountedAsyncSteps)
        return shown

    def _shown(self, iterator: Any, counted: type[_Counted]) -> Any:
        bar = _open_bar(self._title(), self._total, self._steps_before(), self._unit)
        return iterator if bar is None else counted(iterator, _Display(bar, self._statistics, self._diagnose))

    def _total(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):  # the two ways in which datasets say that they have none
            return None


class _Bar(Protocol):
    def draw(self, steps: int, text: str) -> None:
        """Advance by a number of steps."""

    def close(self) -> None:
        """Leave the bar as it is."""


class _Counted:
    """An iterator whose steps are displayed. It keeps no batch."""

    def __init__(self, iterator: Any, display: _Display) -> None:
        self._iterator = iterator
        self._display = display

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:  # a loop that was left
        if not exiting():
            # Without a new verdict: the collector may call this while the figures' lock is held.
            self._display.close(judges=False)


class _CountedSteps(_Counted):
    """Of a `DataLoader`."""

    def __iter__(self) -> _CountedSteps:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except BaseException:
            self._display.close()
            raise
        self._display.step()
        return batch


class _CountedAsyncSteps(_Counted):
    """Of an `AsyncDataLoader`."""

    def __aiter__(self) -> _CountedAsyncSteps:
        return self

    async def __anext__(self) -> Any:
        try:
            batch = await anext(self._iterator)
        except asyncio.CancelledError:
            raise  # of this call: the iterator may be asked again
        except BaseException:
            self._display.close()
            raise
        self._display.step()
        return batch

    async def aclose(self) -> None:
        """End the epoch, as the loader's own iterator does, and leave the bar. Idempotent."""
        try:
            await self._iterator.aclose()
        finally:
            self._display.close()

    def close(self) -> None:
        """`aclose` for code that is not async."""
        try:
            self._iterator.close()
        finally:
            self._display.close()


class _Display:
    """Draws a bar now and then.

    Args:
        bar: to draw.
        statistics: of the loader.
        diagnose: the loader's.
    """

    def __init__(self, bar: _Bar, statistics: Statistics, diagnose: Callable[[], Diagnosis]) -> None:
        self._bar: _Bar | None = bar
        self._statistics = statistics
        self._diagnose = diagnose
        self._steps = 0  # not drawn yet
        self._verdict = ""
        now = perf_counter()
        self._draw_at, self._judge_at = now + _DRAW_S, now + 1.0
        # Time and waiting at the begin of the window, and at the begin of the next.
        self._since = self._next_since = statistics.times()

    def step(self) -> None:
        """Count a batch."""
        self._steps += 1
        now = perf_counter()
        if now >= self._draw_at:
            self._draw(now)

    def _draw(self, now: float) -> None:
        if self._bar is None:
            return
        steps, self._steps = self._steps, 0
        self._draw_at = now + _DRAW_S
        if now >= self._judge_at:
            self._judge_at = now + _JUDGE_S
            bound = self._diagnose().bound
            self._verdict = {"unknown": "", "consumer": ", the loader keeps up"}.get(bound, f", bound by {bound}")
        here = self._statistics.times()
        passed, waited = here[0] - self._since[0], here[1] - self._since[1]
        if here[0] - self._next_since[0] >= _WINDOW_S:
            self._since, self._next_since = self._next_since, here
        share = min(1.0, waited / passed) if passed > 0 else 0.0
        self._bar.draw(steps, f"waits {share:.0%}{self._verdict}")

    def close(self, *, judges: bool = True) -> None:
        """Draw the last steps, perhaps with a new verdict, and leave the bar. Idempotent."""
        bar = self._bar
        if bar is not None:
            if not judges:
                self._judge_at = inf
            self._draw(perf_counter())
            self._bar = None
            bar.close()


def _open_bar(title: str, count: Callable[[], int | None], done: int, unit: str) -> _Bar | None:
    """Return a bar on standard error; None without a terminal, or a package that draws it. `count` returns the number
    of steps, and is called for a bar only: a dataset may read from a store for its length.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    for kind in (_Tqdm, _Rich):
        try:
            return kind(title, count, done, unit)
        except ImportError:
            continue
    return None


class _Tqdm:
    def __init__(self, title: str, count: Callable[[], int | None], done: int, unit: str) -> None:
        from tqdm import tqdm

        # Else tqdm starts a thread that watches its bars.
        kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
        self._bar = kind(
            desc=title, total=count(), initial=done, unit=unit, mininterval=0.0, miniters=1, dynamic_ncols=True
        )

    def draw(self, steps: int, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(steps)

    def close(self) -> None:
        self._bar.close()


class _Rich:
    def __init__(self, title: str, count: Callable[[], int | None], done: int, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._progress.add_task(title, total=count(), completed=done, text="")
        self._begun, self._done = perf_counter(), 0
        self._unit = {"batch": "batches"}.get(unit, f"{unit}s")
        self._progress.start()

    def draw(self, steps: int, text: str) -> None:
        self._done += steps
        rate = self._done / max(1e-9, perf_counter() - self._begun)
        self._progress.update(self._task, advance=steps, text=f"{rate:.1f} {self._unit}/s, {text}", refresh=True)

    def close(self) -> None:
        self._progress.stop()
