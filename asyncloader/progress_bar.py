"""Shows an epoch's progress in a terminal: steps, rate, share of waiting, and what bounds the run.

Data path: loader -> [progress_bar] -> the user. For ``loader.progress()``.

tqdm draws the bar from the consumer's thread, ten times a second at most; there is no thread. Without a terminal or
without tqdm the loader's own iterator is returned.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from math import inf
from time import perf_counter
from typing import Any, Generic, TypeVar

from asyncloader.telemetry.diagnosis import Diagnosis
from asyncloader.telemetry.statistics import Statistics

B = TypeVar("B")

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
    """

    def __init__(
        self,
        loader: Any,
        statistics: Statistics,
        steps_before: Callable[[], int],
        title: Callable[[], str],
        diagnose: Callable[[], Diagnosis],
    ) -> None:
        self._loader = loader
        self._statistics = statistics
        self._steps_before, self._title = steps_before, title
        self._diagnose = diagnose

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
        # A dataset may read from a store for its length, which is asked for a bar only.
        if sys.stderr is None or not sys.stderr.isatty():
            return iterator
        try:
            from tqdm import tqdm
        except ImportError:
            return iterator
        words = _Words(self._statistics, self._diagnose)
        drawn: Any = tqdm.format_dict  # the figures of a drawing, to which ours are added
        members = {
            "monitor_interval": 0,  # else tqdm starts a thread that watches its bars
            "format_dict": property(lambda bar: {**drawn.fget(bar), "postfix": words.now()}),
        }
        kind: Any = type("Bar", (tqdm,), members)
        numbers = {"total": self._total(), "initial": self._steps_before(), "miniters": 1}
        bar = kind(desc=self._title(), unit="batch", dynamic_ncols=True, **numbers)
        return counted(iterator, bar, words)

    def _total(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):  # the two ways in which datasets say that they have none
            return None


class _Words:
    """Says how much the consumer waits, and what bounds the run."""

    def __init__(self, statistics: Statistics, diagnose: Callable[[], Diagnosis]) -> None:
        self._statistics, self._diagnose = statistics, diagnose
        self._verdict = ""
        self.judge_at = perf_counter() + 1.0
        """When a new verdict is due."""
        # Time and waiting at the begin of the window, and at the begin of the next.
        self._since = self._next_since = statistics.times()

    def now(self) -> str:
        """Return the words of a bar that is drawn now."""
        now, here = perf_counter(), self._statistics.times()
        if now >= self.judge_at:
            self.judge_at = now + _JUDGE_S
            bound = self._diagnose().bound
            self._verdict = {"unknown": "", "consumer": ", the loader keeps up"}.get(bound, f", bound by {bound}")
        passed, waited = here[0] - self._since[0], here[1] - self._since[1]
        if here[0] - self._next_since[0] >= _WINDOW_S:
            self._since, self._next_since = self._next_since, here
        return f"waits {min(1.0, waited / passed) if passed > 0 else 0.0:.0%}{self._verdict}"


class _Counted:
    """An iterator whose steps a bar counts. It keeps no batch."""

    def __init__(self, iterator: Any, bar: Any, words: _Words) -> None:
        self._iterator, self._bar, self._words = iterator, bar, words

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:  # a loop that was left
        if not exiting():
            # Without a new verdict: the collector may call this while the figures' lock is held.
            self._words.judge_at = inf
            self._bar.close()


class _CountedSteps(_Counted):
    """Of a `DataLoader`."""

    def __iter__(self) -> _CountedSteps:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except BaseException:
            self._bar.close()
            raise
        self._bar.update()
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
            self._bar.close()
            raise
        self._bar.update()
        return batch

    async def aclose(self) -> None:
        """End the epoch, as the loader's own iterator does, and leave the bar. Idempotent."""
        try:
            await self._iterator.aclose()
        finally:
            self._bar.close()

    def close(self) -> None:
        """`aclose` for code that is not async."""
        try:
            self._iterator.close()
        finally:
            self._bar.close()
