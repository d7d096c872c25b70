"""Takes the indices of a plain sampler in the iterating thread: before the first batch, and one with each delivery.

Data path: sampler -> [sampler_reading] -> scheduler. Part of the consumer.

A sampler's error ends the epoch, behind the batches that were asked for before it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from asyncloader.base.events import ENDED, NOTHING, Deliver, SamplerFailed
from asyncloader.epoch.torch_iterator import TorchIterator
from asyncloader.samplers.index_stream import time_pull
from asyncloader.state.progress import Progress
from asyncloader.telemetry.statistics import Statistics

# The steps of a delivery, in order.
BEGUN, OPENING, OPENED, RELEASED, PULLED, ADVANCED, COUNTED, DONE = range(8)


class Delivery:
    """The progress of the current delivery. Ctrl-C may end a call of `deliver`; the next call continues from here."""

    __slots__ = ("batch", "descriptors", "error", "item", "offer", "reached")

    def __init__(self) -> None:
        self.item: Deliver | None = None
        """The caller of `deliver` sets `item`, `batch` and `error` to None once the user has the batch or the error."""
        self.batch: Any = None
        self.error: Any = None  # instead of a batch: an exception, or torch's wrapper of one
        self.descriptors: list[int] | None = None  # the answer's descriptors that must still be closed
        self.offer: Any = NOTHING  # the sampler's next index
        self.reached = BEGUN


class SamplerReading:
    """The base of `Consumer`, which delivers: how the sampler is advanced."""

    _progress: Progress
    _statistics: Statistics
    _torch_iter: Callable[[], TorchIterator | None]
    _reads: bool
    _tasks: int
    _taken: int

    def _prime(self, count: int) -> list[Any]:
        offers: list[Any] = []
        try:
            while self._reads and len(offers) < count and (offer := self._pull(self._tasks)) is not NOTHING:
                # ENDED is passed on, too: the pipeline notifies the scheduler of it.
                offers.append(offer)
                self._reads = offer is not ENDED
                self._tasks += self._reads
        except Exception as error:
            if not offers:
                raise
            offers.append(SamplerFailed(error))
            self._reads = False
        return offers

    def _pull(self, left: int) -> Any:
        """The sampler's next index, while `left` are outstanding. The same again until `_tasks` is incremented."""
        torch_iter = self._torch_iter()
        assert torch_iter is not None
        try:
            # By the task's number, so that a call that is repeated after Ctrl-C gets the same index again.
            return pull_timed(torch_iter, self._tasks, self._progress, self._statistics)
        except StopIteration:
            return NOTHING if left else ENDED  # as torch, ask again after the next batch
        finally:
            del torch_iter  # an error is kept, and refers to this frame, which must not keep the iterator

    def _advance(self, delivery: Delivery) -> None:
        """Take the next index from the sampler."""
        offer: Any = NOTHING
        over = False
        if self._reads:
            try:
                offer = self._pull(self._tasks - self._taken - 1)
            except Exception as error:
                offer = SamplerFailed(error)
                over = True
        # No calls from here on, so that Ctrl-C cannot interrupt it halfway.
        if over or offer is ENDED:
            self._reads = False
        elif offer is not NOTHING:
            self._tasks += 1
        self._taken += 1
        delivery.offer, delivery.reached = offer, PULLED
        offer = None  # an error's traceback refers to this frame


def pull_timed(torch_iter: TorchIterator, task: int, progress: Progress, statistics: Statistics) -> Any:
    """Advance a plain sampler. Returns the index of this task, and notes its step in `progress`; a second call for the
    same task returns the same again.

    Raises:
        StopIteration: at the end.
        Exception: the sampler's.
    """
    order = torch_iter.order
    assert order is not None
    # As `TorchIterator.pull`, which is called where a library has put an iterator in the place of the order.
    pull = order.pull if torch_iter.__dict__["_sampler_iter"] is order else torch_iter.pull
    began = perf_counter()
    try:
        step, index = pull(task)
    except StopIteration:
        raise
    except Exception:
        progress.cut_short = True
        del torch_iter, pull  # the error, which may be kept, refers to this frame, and must not keep the iterator
        raise
    seconds, log = perf_counter() - began, order.log
    if log is None:
        statistics.note_sampler(seconds)
    else:
        time_pull(log, statistics.recorder, seconds)
    progress.pulled(task, step)
    return index
