"""The main function of a worker thread: carries out tasks without touching what belongs to the whole process.

Data path: scheduler -> link -> [thread_runner: fetch -> collate] -> link -> reorder.

A worker process seeds its global generators, sets the number of torch's threads and changes torch's collation. The
training process does all that as its user wishes, so here a worker has generators of its own (`worker_info.py`), and
the number of threads is set for its thread alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncloader.base.events import bare_index
from asyncloader.errors import warn_aside
from asyncloader.telemetry.counters import Recorder, recording
from asyncloader.workers.fetch.seeding import numpy_mark
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.fetch.worker_info import ContextInfo, answer_with
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.codec import Encoded
from asyncloader.workers.ipc.collate import count_samples
from asyncloader.workers.ipc.ring import WorkerRing
from asyncloader.workers.link import ObjectCodec, ThreadChannel
from asyncloader.workers.stream_readers import ContextIdentities, Identify
from asyncloader.workers.task_runner import TaskRunner
from asyncloader.workers.worker import AsyncTaskLoop, serve_async

_OPENMP = ("libgomp.so.1", "libomp.so.5", "libiomp5.so")
"""The names of OpenMP's libraries, for where their functions are not global."""


class ThreadTaskRunner(TaskRunner):
    """A `TaskRunner` in a thread of the consumer's process. Its batches stay in the memory where they are collated."""

    _alone = False
    # All of them: in a thread they would end nothing but the thread.
    _caught = (BaseException,)
    _clock = staticmethod(thread_time)

    def __init__(self, said: Said, *args: Any) -> None:
        self._said = said
        super().__init__(*args)

    def _enter(self) -> None:
        torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.get_num_threads()  # sets the number for a new thread to that of the process, which would undo the next
        set_threads = _openmp_setter()
        if set_threads is not None:
            set_threads(1)

    def _seed(self, setup: WorkerSetup) -> int:
        self._draws = GlobalDraws(self._said, seeded=setup.seeded is not None)
        return setup.base_seed + self.worker_id

    def _install_info(self, setup: WorkerSetup, seed: int, dataset: Any) -> None:
        del seed
        answer_with(ContextInfo(self.worker_id, setup, dataset))

    def _identify(self, setup: WorkerSetup, datasets: Mapping[int, Any]) -> Identify:
        return ContextIdentities(setup, datasets)

    def _watched(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._draws.watched, fetch)

    def _make_collate(self, setup: WorkerSetup) -> Callable[[Any], Encoded]:
        collate_fn, auto, encode = setup.collate_fn, setup.auto_collation, self._encoder.encode

        def collate(data: Any) -> Encoded:
            self._samples = count_samples(data) if auto else 1
            return encode(collate_fn(data))

        return collate

    def _write_batch(self, encoded: Encoded, slot: int, ring: WorkerRing | None, index: Any) -> tuple[int, list[int]]:
        del encoded, slot, ring  # the batch is where it was collated
        if self._samples < 0:
            self._samples = len(bare_index(index))
        return wire.NO_SLOT, []


@functools.cache
def _openmp_setter() -> Callable[[int], None] | None:
    """Return OpenMP's function that sets the number of threads that the calling thread's operations use, if torch has
    loaded one. `torch.set_num_threads` would also set it for threads that the process makes later.
    """
    loaded = getattr(os, "RTLD_NOLOAD", 0)  # only a library that the process has: torch's
    for name in (None, *_OPENMP) if loaded else (None,):
        try:
            found: Any = ctypes.CDLL(name, mode=ctypes.DEFAULT_MODE | (loaded if name else 0)).omp_set_num_threads
        except (AttributeError, OSError, TypeError):
            continue
        return found  # type: ignore[no-any-return]
    return None


def run_thread(
    said: Said,
    worker_id: int,
    channel: ThreadChannel,
    setup: WorkerSetup,
    recorder: Recorder,
    entered: float,
    codec: ObjectCodec,
) -> None:
    """Carry out the tasks of one worker until its channel ends."""
    with recording(recorder):
        runner = ThreadTaskRunner(said, worker_id, channel, setup, recorder, entered, codec)
        try:
            if runner.asynchronous:
                serve_async(AsyncTaskLoop.of(runner), in_thread=True)
            else:
                _serve_blocking(runner, channel)
        finally:
            runner.release()


def _serve_blocking(runner: TaskRunner, channel: ThreadChannel) -> None:
    inbox: deque[tuple[int, bytes]] = deque()
    while True:
        # Before each task: the end of the channel takes effect before the tasks that are queued.
        inbox.extend(channel.receive(wait=not inbox))
        if channel.ended:
            return
        kind, body = inbox.popleft()
        if kind == wire.TASK:
            runner.task(body)
        else:
            runner.control(kind, body)
        del body


# ------------------------------------------------------------------- draws from the generators of the whole process

# Draws from the generators of the whole process depend on what the other threads do at the same time, so in seeded
# mode they are refused, and in torch mode there is one warning. The training loop draws from the same generators, so
# it is not enough to see that their states have changed: a draw of Python's `random` is seen as a call by this
# thread, and one of torch as a change during an operation of this thread. numpy's functions can be seen in neither
# way; there a change is only a reason to warn. Watched are the tasks number 0, 1, 3, 7, 15 and so on of each worker:
# watching takes longer than most samples.

_INSTEAD = (
    'These belong to the whole process, and with workers="threads" several threads draw from them at the same time. '
    "In the dataset, use asyncloader.sample_rng().torch, .numpy or .random, torch.thread_safe_generator() or "
    "get_worker_info().rng, or use worker processes."
)
_PYTHONS: Any = random._inst
_DRAWING = ("random", "getrandbits", "seed")


class _TorchDraws(TorchFunctionMode):
    """Notes whether this thread calls a function of torch that draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = any(
            isinstance(value, torch.Generator) and value is not torch.default_generator
            for value in (*args, *kwargs.values())
        )
        if own or not _may_draw(getattr(func, "__name__", ""), getattr(func, "__module__", None)):
            return func(*args, **kwargs)
        # A dropout that is switched off draws nothing.
        before = _torch_mark()
        result = func(*args, **kwargs)
        self.drawn = self.drawn or _torch_mark() != before
        return result


@functools.cache
def _may_draw(name: str, module: str | None) -> bool:
    """Whether this function of torch's may draw; those that are made of others may."""
    operation = getattr(torch.ops.aten, name, None)
    if operation is None:
        return module in ("torch.nn.functional", "torch.nn.init")
    return any(torch.Tag.nondeterministic_seeded in getattr(operation, each).tags for each in operation.overloads())


def _torch_mark() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


class Said:
    """Whether a loader's warning was given; all of its workers have the same."""

    yet = False


class GlobalDraws:
    """Watches the tasks of one worker thread.

    Args:
        seeded: whether a draw is an error.
        said: of the loader.
    """

    def __init__(self, said: Said, *, seeded: bool) -> None:
        self._said = said
        self._seeded = seeded
        self._task, self._due = 0, 0
        self._over = False

    def watched(self, fetch: Callable[..., Any], *args: Any) -> Any:
        """Return what the call returns.

        Raises:
            RuntimeError: in seeded mode the call drew from generators of the whole process.
        """
        task, self._task = self._task, self._task + 1
        if task < self._due or self._over:
            return fetch(*args)
        self._due = 2 * task + 1
        result, names = _names_drawn(fetch, args)
        certain = [name for name in names if name != "numpy"]
        if names:
            text = f"A dataset drew from the process-global generators ({', '.join(names)}). {_INSTEAD}"
            if self._seeded and certain:
                raise RuntimeError(text)
            self._over = True
            if not self._said.yet:
                self._said.yet = True
                warn_aside(text, RuntimeWarning, stacklevel=2)
        return result


def _names_drawn(fetch: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[str]]:
    called = False

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal called
        del frame
        if event == "c_call" and getattr(function, "__self__", None) is _PYTHONS and function.__name__ in _DRAWING:
            called = True

    before = numpy_mark()
    profiles = sys.getprofile() is None  # otherwise the user's profiler is left alone
    with _TorchDraws() as torchs:
        if profiles:
            sys.setprofile(profile)
        try:
            result = fetch(*args)
        finally:
            if profiles:
                sys.setprofile(None)
    found = {"random": called, "numpy": numpy_mark() != before, "torch": torchs.drawn}
    return result, [name for name, drawn in found.items() if drawn]
