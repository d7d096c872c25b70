"""Calls a blocking dataset on behalf of an event loop: in a thread, or on the loop itself where that is cheaper.

Data path: sampler -> async_inline: [thread_or_loop: fetch -> collate] -> the user.

A thread keeps the loop free, but a batch's way there and back costs as much as making a batch of tiny samples. So the
thread makes batches until several in a row took little time, and did not wait for anything; then the loop makes them.
A batch that takes long there sends those after it back. The first batch of an epoch, for which a dataset may open
files, is always made in the thread.

The dataset should not notice where it is called. On the loop, too, it sees no running loop, so it may run one of its
own; always the same context variables, which are not the consumer's; and gradients enabled. What belongs to a thread it
does notice: a handle that only the thread which opened it may use. And it must not wait for the loop, which would wait
for it. `concurrency=1` is for those.

The caller never has two calls in progress at a time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from time import monotonic, perf_counter, thread_time
from typing import Any, Final, TypeAlias

import torch

from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import at_exit
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.threads import JobThreads

if sys.platform != "win32":
    import resource

HOLD_SECONDS: Final = 1e-3
"""How long one batch, or ``async for`` over several, may hold up the loop. The way to the thread and back takes 60 to
120 microseconds, a twentieth of this or more; and Python code in a thread keeps the loop waiting, too: for the GIL, up
to 5 milliseconds (`sys.getswitchinterval`)."""

_OF_THREAD: Final[int | None] = None if sys.platform == "win32" else getattr(resource, "RUSAGE_THREAD", None)
"""None where the system does not count the waits of a thread (macOS): there the dataset is always called in the thread.
"""

_DUE: Final = 8  # cheap batches in a row: one that seemed not to wait may be chance
_MOST_DUE: Final = 1000

_EXIT_SECONDS: Final = 2.0
"""How long an exiting process waits for the dataset's current call."""

_Fetch: TypeAlias = Callable[[Any, Any], Any]

# Read once: on a tiny batch each look-up counts.
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
_running_loop, _run_as = asyncio._get_running_loop, asyncio._set_running_loop
# From Python 3.14 on a thread has one current task, not one for each loop: a loop of the dataset's own would wait for
# ever beside the consumer's task.
_swap_task: Any = getattr(asyncio.tasks, "_swap_current_task", None) if sys.version_info >= (3, 14) else None


class BatchCosts:
    """What the epochs of one loader have shown of its batches, together: epochs may have few of them."""

    def __init__(self) -> None:
        self.due = self.all_due = _DUE
        """How many cheap batches in a row the thread must still make before the loop makes the next."""


class FetchPlace:
    """The thread, and the decision whether to use it.

    Args:
        costs: of the loader.
        initializer: called in the thread before anything else.
        movable: whether the dataset may be called on the loop at all.
    """

    def __init__(self, costs: BatchCosts, initializer: Callable[[], None] | None, *, movable: bool) -> None:
        self._thread = JobThreads(1, "asyncloader-fetch")
        self._initializer = initializer
        at_exit(_close_all)
        _places.add(self)
        self._movable = movable and _OF_THREAD is not None
        # One for all calls, in the thread and on the loop. It is empty at first: the consumer's variables are not the
        # dataset's.
        self._context = Context()
        self.turn = 0.0
        """When the loop last had a turn, as far as is known."""
        self._costs = costs
        self._begun = False  # whether the epoch's first batch was made

    @property
    def here(self) -> bool:
        """Whether the next batch should be made on the loop, by `fetch_here`."""
        # Modes that torch keeps by thread, such as a default device, would give other batches than in the thread.
        return self._movable and self._begun and self._costs.due <= 0 and not _function_modes() and not _autocasts()

    def fetch_here(self, fetch: _Fetch, index: Any, records: Any) -> Any:
        """Return ``fetch(index, records)``, called in this thread, which is the loop's."""
        loop, begin = _running_loop(), perf_counter()
        task = None if _swap_task is None else _swap_task(loop, None)
        try:
            # asyncio lets no second loop run in a thread that has one: a dataset may run a loop of its own, here as in
            # the thread.
            _run_as(None)
            if torch.is_grad_enabled():
                return self._call(fetch, index, records)
            with torch.inference_mode(mode=False), torch.enable_grad():
                return self._call(fetch, index, records)
        finally:
            _run_as(loop)
            if _swap_task is not None:
                _swap_task(loop, task)
            passed = perf_counter() - begin
            # The longer, the more: a dataset that is slow now and then (a stream that reads a block ahead) must not
            # hold up the loop again and again.
            if passed >= HOLD_SECONDS:
                self._costs.due = self._costs.all_due = max(_DUE, min(_MOST_DUE, int(passed / HOLD_SECONDS)))

    def turned(self) -> None:
        """Record that the loop had a turn just now."""
        self.turn = perf_counter()

    def fetch_in_thread(self, fetch: _Fetch, index: Any, records: Any) -> Awaitable[Any]:
        """Return ``fetch(index, records)``, called in the thread. See `fetch_here`."""
        return self.in_thread(partial(self._fetch, fetch, index), records)

    def in_thread(self, function: Callable[[Any], Any], argument: Any) -> Awaitable[Any]:
        """Call a function in the thread."""
        # Not `_context`: the call uses a copy, and variables that the dataset sets must last. `_call` enters it.
        return self._thread.call(partial(self._initialized, function), argument, Context())

    def _initialized(self, function: Callable[[Any], Any], argument: Any) -> Any:
        initializer, self._initializer = self._initializer, None
        if initializer is not None:
            initializer()
        return function(argument)

    def _fetch(self, fetch: _Fetch, index: Any, records: Any) -> Any:
        waits, begin = _waits(), thread_time()
        try:
            return self._call(fetch, index, records)
        finally:
            # It may have waited for something that runs on this very loop, where it would wait for ever. So the dataset
            # stays here, unless it waits no more.
            if thread_time() - begin < HOLD_SECONDS and waits == _waits():
                self._costs.due -= 1
                if not self._costs.due:  # a long batch may have been chance
                    self._costs.all_due = max(_DUE, self._costs.all_due // 2)
            elif self._begun:  # else it may have opened files
                self._costs.due = self._costs.all_due
            self._begun = True

    def _call(self, fetch: _Fetch, index: Any, records: Any) -> Any:
        try:
            return self._context.run(fetch, index, records)
        except EndOfData:
            raise
        except (StopIteration, StopAsyncIteration) as error:
            # A future cannot carry the first, and ``async for`` would take the second for the end of the epoch.
            raise not_the_end(error, "the dataset's code") from error

    def close_soon(self) -> None:
        """Let the thread end after its current call. Does not wait."""
        self._movable = False
        self._thread.close()

    def close(self, seconds: float | None = None) -> None:
        """Let the thread end after its current call, and wait for that, at most this long."""
        self.close_soon()
        self._thread.join(seconds)


# The threads are daemons: a call that never returns must not keep the interpreter. But finalization ends a daemon
# thread wherever it is, and aborts the process if that is in C++ code, so a call that does return is waited for.
_places: LiveObjects[FetchPlace] = LiveObjects()


def _close_all() -> None:
    deadline = monotonic() + _EXIT_SECONDS
    for place in _places:
        place.close(max(0.0, deadline - monotonic()))


def _waits() -> int:
    """How often this thread has waited for something. (Not how often another thread was given its core.)"""
    return 0 if _OF_THREAD is None else resource.getrusage(_OF_THREAD).ru_nvcsw
