"""Enters a dataset's async context (`__aenter__`) before its first sample, and exits it after the last.

Data path: worker: [context] around fetch. Without workers it runs in the consumer's process.

The same task enters and exits, as cancel scopes and task groups require. Exiting takes bounded time and is then
cancelled, so that a dataset cannot hold up the end of a worker.

`UnexpectedCancellation` wraps awaited code of the user: datasets, their contexts, async samplers. Code that
raises a CancelledError although its task was not cancelled has failed; asyncio would take the task for a cancelled one
and report nothing, and its batch would never be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from types import TracebackType
from typing import Any

from asyncloader.base.shielding import shielded
from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_kinds import parts_of

EXIT_SECONDS = 1.5
"""Seconds that `__aexit__` may take. A worker that was asked to end is terminated after two seconds."""


# Event loops refer to their tasks weakly. A context may be part of a reference cycle, as an iterator in an error's
# traceback is: then the collector would close its task's coroutine, wherever it runs. So the tasks are kept here, and
# the loop ends them when the iterator's finalizer asks for it.
_entered: set[asyncio.Task[None]] = set()

_leaving: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
"""Those of iterators that were dropped, which nobody waits for but the end of a loader."""


def context_managers(dataset: Any) -> list[Any]:
    """Return the async context managers of a dataset: itself, or the datasets that it is a view of; each once."""
    if hasattr(type(dataset), "__aenter__") and hasattr(type(dataset), "__aexit__"):
        return [dataset]
    # By identity: two datasets that are equal have two contexts.
    found = {id(each): each for part in parts_of(dataset) for each in context_managers(part)}
    return list(found.values())


class DatasetContext:
    """Enters a dataset's async context and exits it.

    Args:
        dataset: the dataset.
        after: its `aclose` is awaited before the dataset's context exits; None: nothing.
    """

    def __init__(self, dataset: Any, after: Any = None) -> None:
        self._managers = [] if dataset is None else context_managers(dataset)
        if after is not None:
            self._managers.append(contextlib.aclosing(after))
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[None] | None = None
        self._leave: asyncio.Event | None = None
        self._order = asyncio.Lock()

    @property
    def needed(self) -> bool:
        """Whether there is anything to await."""
        return bool(self._managers)

    async def open(self) -> None:
        """Enter the context, once. If that failed, the next call tries again. Several tasks may wait here, and go on in
        the order in which they came.

        Raises:
            BaseException: what entering raised.
        """
        if not self.needed:
            return
        if self._opened is None or (
            self._opened.done() and (self._opened.cancelled() or self._opened.exception() is not None)
        ):
            self._loop = asyncio.get_running_loop()
            self._opened, self._leave = self._loop.create_future(), asyncio.Event()
            self._task = self._loop.create_task(self._hold(self._opened, self._leave))
            _entered.add(self._task)
            self._task.add_done_callback(_entered.discard)
        opened = self._opened
        # A finished future is no queue: the tasks that waited for it wake up two turns of the loop later. A task that
        # comes between would not wait at all, overtake them, and read the samples of another task's batch.
        async with self._order:
            # Shielded: a task that waits here may be cancelled while others still wait.
            await shielded(opened)

    async def _hold(self, opened: asyncio.Future[None], leave: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                with UnexpectedCancellation("the dataset's"):
                    for manager in self._managers:
                        await stack.enter_async_context(manager)
                if not opened.done():
                    opened.set_result(None)
                await leave.wait()
        # Whatever it is: tasks that wait in `open` must not wait on.
        except BaseException as error:
            if opened.done():
                raise
            if isinstance(error, asyncio.CancelledError):
                opened.cancel()
                raise
            if isinstance(error, GeneratorExit):  # it would close the coroutines of those that wait
                error = not_the_end(error, "the dataset's code")
            opened.set_exception(error)
            opened.exception()  # marked as retrieved: perhaps no task waits any more

    async def close(self, seconds: float = EXIT_SECONDS) -> BaseException | None:
        """Exit the context; cancelled after `seconds`. Returns the exception that exiting raised. Idempotent."""
        # Taken first: a second call in the meantime has nothing to exit.
        task, self._task = self._task, None
        self._opened = None
        if task is None:
            return None
        if self._leave is not None:
            # Asks the task that entered to exit, too: cancel scopes and task groups demand the same task.
            self._leave.set()
        # Not `wait_for`, which would wait for the task's end without a bound once it has cancelled it.
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=0.1)
        if not task.done() or task.cancelled():
            return None
        return task.exception()

    def close_soon(self) -> None:
        """Have the loop exit the context, if the loop still runs. Any thread; `close` may follow."""
        leave, loop = self._leave, self._loop
        if self._task is not None and loop is not None and leave is not None:
            _leaving.add(self._task)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                # An asyncio event may be set in its loop's thread only.
                loop.call_soon_threadsafe(leave.set)


async def wait_until_left(seconds: float = EXIT_SECONDS) -> None:
    """Wait until the contexts are exited that iterators which were dropped have entered in this loop. After `seconds`
    they are cancelled.
    """
    loop = asyncio.get_running_loop()
    # Not for the caller itself: a dataset's context may close a loader.
    leaving = {each for each in [*_leaving] if each.get_loop() is loop} - {asyncio.current_task()}
    if leaving:
        _, late = await asyncio.wait(leaving, timeout=seconds)
        for each in late:
            each.cancel()


def warn_of_exit(error: BaseException | None) -> None:
    """Warn of an error of the dataset's `__aexit__`. All batches were delivered, so it is not raised."""
    if error is not None:
        warnings.warn(f"the dataset's __aexit__ raised {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)


class UnexpectedCancellation:
    """Turns a CancelledError into an error if the current task was not cancelled.

    Args:
        whose: whose code the block runs, for the error's text: "the dataset's".

    Raises:
        RuntimeError: instead of such a CancelledError, which is its cause.
    """

    __slots__ = ("_whose",)

    def __init__(self, whose: str) -> None:
        self._whose = whose

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, asyncio.CancelledError):
            return
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise self_cancelled(self._whose) from error


def self_cancelled(whose: str) -> RuntimeError:
    """Return the error to raise from a CancelledError that the user's code raised of itself."""
    return RuntimeError(f"{whose} code cancelled itself, or let what it awaited be cancelled")
