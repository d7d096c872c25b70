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
from collections import deque
from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any

import torch

from asyncloader.base.events import bare_index
from asyncloader.telemetry.counters import Recorder, recording
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.fetch.worker_info import ContextInfo, answer_with
from asyncloader.workers.ipc import wire
from asyncloader.workers.memory.codec import Encoded
from asyncloader.workers.memory.collate import count_samples
from asyncloader.workers.memory.ring import WorkerRing
from asyncloader.workers.stream_readers import ContextIdentities, Identify
from asyncloader.workers.task_runner import TaskRunner
from asyncloader.workers.threads.global_draws import GlobalDraws, Said
from asyncloader.workers.threads.link import ObjectCodec, ThreadChannel
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
