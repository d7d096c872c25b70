"""One worker's tasks: from the frame to the answer.

Data path: channel -> [task_runner: fetch -> collate -> ring slot] -> channel.

Holds what a worker has: its copy of the dataset, its ring, its random numbers. Knows nothing of how frames are waited
for; that is `worker.py`'s.

An error on its way out of a worker. Data path: worker: fetch -> [error_pickle] -> answer -> consumer.

What a worker that leaves hands to the one that takes its place: where its random numbers stood.

Data path: beside the worker's start and end. Of use in torch mode alone, where random numbers are the worker's; in
seeded mode they are the samples'. A worker that is killed hands over nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import random
import select
import warnings
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.graph_settings import apply_random_seed

from asyncloader.counters import COUNTERS
from asyncloader.errors import LoaderError
from asyncloader.events import bare_index
from asyncloader.workers.fetch.assignment_client import WorkerAssignments
from asyncloader.workers.fetch.context import DatasetContext, Unasked
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.fetch.error_notes import add_note, collation_place, take_notes
from asyncloader.workers.fetch.reader import Reader
from asyncloader.workers.fetch.sample_errors import BadSample, NoSamples
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup, install_worker_info, seed_worker
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.memory import segment
from asyncloader.workers.memory.codec import Encoded, Encoder
from asyncloader.workers.memory.collate import Collator, use_private_memory
from asyncloader.workers.memory.ring import WorkerRing
from asyncloader.workers.memory_use import Footprint
from asyncloader.workers.setup_payload import Payload
from asyncloader.workers.stderr_capture import kept_stderr

__all__ = [
    "TaskRunner",
    "pickle_error",
    "restore_generators",
    "save_generators",
]

_ASKED_FOR = 64 << 20
"""Bytes from which on a batch of its own is held against the memory there is, which takes 50 microseconds."""


class TaskRunner:
    """Carries tasks out and answers them.

    An error at start-up (a dataset that does not unpickle, `worker_init_fn`, `__aenter__`, `__iter__`) is kept and
    answers the first task, as torch does, and the others of the epoch, too. The next epoch of persistent workers tries
    `__aenter__` and `__iter__` again.
    """

    def __init__(self, worker_id: int, channel: Channel, setup: WorkerSetup | Payload) -> None:
        self.worker_id = worker_id
        self.channel = channel
        self.stopped = False
        self.asynchronous = False
        self._ring: WorkerRing | None = None
        self._ring_number = -1
        self._assignments = WorkerAssignments(self.channel_send)
        self._counted = COUNTERS.sums.copy()  # what this process's parent did is not ours
        self._encoder = Encoder()
        self._last_template = b""
        self._samples = 0
        self._epoch = 0
        self._cpu_mark = process_time()
        self._ended = False  # this worker's copy of an iterable dataset has ended in this epoch
        self._start_error: bytes | None = None
        self._reader: Reader | None = None
        self._context: DatasetContext | None = None  # what is entered in the loop before the first task
        self._suspect: int | None = None  # where the next task's standard error is to be kept
        self._footprint: Footprint | None = None
        self._memory_limit = 0
        self._worked = False  # this process has carried out a task, after which it may leave
        torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.set_num_threads(1)
        use_private_memory()
        self.channel_send(wire.pack(wire.READY))  # from here on the user's code may run
        try:
            self._setup = setup.load() if isinstance(setup, Payload) else setup
            self._start(self._setup)
        except Exception as error:
            self._start_error = pickle_error(error, self.worker_id)
        if not self.opens:
            self._started()

    @property
    def opens(self) -> bool:
        """Whether `open` must be awaited before the worker has started."""
        return self._context is not None and self._start_error is None

    async def open(self) -> None:
        """Await what `worker_init_fn` gave, and enter the dataset's context."""
        await self._entered()
        self._started()

    async def _entered(self) -> None:
        if self._context is None or self._start_error is not None:
            return
        try:
            await self._context.open()
        except Exception as error:
            if self._start_error is None:
                self._start_error = pickle_error(error, self.worker_id)

    async def close(self) -> None:
        """Leave the dataset's context, within bounded time."""
        if self._context is None:
            return
        error = await self._context.close()
        if error is not None:
            warnings.warn(
                f"the dataset's __aexit__ raised {type(error).__name__}: {error}", RuntimeWarning, stacklevel=1
            )

    def _started(self) -> None:
        """Say so, with the error that it ended in, or where the dataset stands."""
        cursor = b""
        if self._start_error is None and self._reader is not None and not self.asynchronous:
            cursor = self._reader.first_cursor()
        self.channel_send(wire.pack_started(self._epoch, self._start_error or b"", cursor))

    def _start(self, setup: WorkerSetup) -> None:
        self._epoch = self._assignments.epoch = setup.attachment
        seed = seed_worker(setup.base_seed, self.worker_id)
        start = setup.starts[self.worker_id]
        dataset = self._reseed_datapipe(setup.dataset, start.shared_seed)
        reader = self._reader = Reader(
            setup,
            dataset,
            self._make_collate(setup),
            worker_id=self.worker_id,
            in_worker=True,
            assignments=self._assignments,
        )
        install_worker_info(self.worker_id, setup.num_workers, seed, dataset)
        self.asynchronous = reader.asynchronous
        before = None if setup.worker_init_fn is None else setup.worker_init_fn(self.worker_id)
        self._context = self._make_context(before)
        reader.begin(start)
        if setup.handover:
            restore_generators(setup.handover)
        if setup.memory_limit is not None:
            self._memory_limit, self._footprint = setup.memory_limit, Footprint()

    def _make_context(self, before: Any) -> DatasetContext | None:
        awaitable = before is not None and inspect.isawaitable(before)
        if awaitable and not self.asynchronous:
            if inspect.iscoroutine(before):
                before.close()
            raise TypeError(
                "worker_init_fn returned an awaitable, but the dataset is a blocking one, so its workers have no event "
                "loop to await it in: give a plain function, or a dataset with async methods"
            )
        assert self._reader is not None
        context = self._reader.context(before if awaitable else None)
        return context if context.needed else None

    def _reseed_datapipe(self, dataset: Any, shared_seed: int | None) -> Any:
        if isinstance(dataset, IterDataPipe):
            generator = torch.Generator()
            generator.manual_seed(shared_seed or 0)
            dataset = apply_random_seed(dataset, generator)
        return dataset

    def _make_collate(self, setup: WorkerSetup) -> Callable[[Any], Encoded]:
        """A function from what was fetched to an encoded batch."""
        collate_fn, auto = setup.collate_fn, setup.auto_collation
        collator = Collator(self._encoder) if collate_fn is torch_collate.default_collate else None

        def collate(data: Any) -> Encoded:
            self._samples = len(data) if auto else 1
            return self._encoder.encode(collate_fn(data)) if collator is None else collator.collate(data)

        return collate

    # --------------------------------------------------------------------------------------------- frames

    def control(self, kind: int, body: bytes) -> None:
        """Everything but a task."""
        if kind == wire.RING:
            number, slots, slot_bytes = wire.unpack_ring(body)
            self._ring = WorkerRing(self.channel.take_fd(), slots, slot_bytes)
            self._ring_number = number
        elif kind == wire.RESET:
            self._reset(body)
        elif kind == wire.ASSIGNMENT:
            self._assignments.answered(body)
        elif kind == wire.SUSPECT:
            self._suspect = self.channel.take_fd()
        elif kind == wire.STOP:
            self.stopped = True

    @property
    def outgrown(self) -> bool:
        """Whether this worker has grown beyond its bound, and should leave in place of the task that it was given now.
        Not without one: when its epoch is over nobody takes what it hands over.
        """
        if self._footprint is None or self._ended or not self._worked:
            return False
        if self._footprint.growth() <= self._memory_limit:
            return False
        # A stream that another worker could not read on is left to this one.
        return self._setup.replays or (self._reader is not None and self._reader.can_go_on)

    def retire(self) -> None:
        """Say that this worker leaves. Call it with no task in hand, and take none afterwards."""
        seeded = self._setup.seeded is not None
        self.channel_send(wire.pack(wire.RETIRING, b"" if seeded else save_generators()))

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Around a task: keeps what one that is suspected writes to standard error."""
        suspect, self._suspect = self._suspect, None
        return contextlib.nullcontext() if suspect is None else kept_stderr(suspect)

    def _reset(self, body: bytes) -> None:
        epoch, payload = wire.unpack_reset(body)
        self._epoch = self._assignments.epoch = epoch
        self._ended = False
        self.channel_send(wire.pack_reset(wire.RESET_DONE, epoch))
        reader = self._reader
        if reader is None:
            return  # the set-up did not unpickle: that stays the answer to every task
        if self._setup.iterable or is_stateful(reader.dataset):
            self._worked = False  # before its first answer in this epoch nobody knows where its dataset stands
        self._start_error = None
        start = EpochStart(*pickle.loads(payload))
        try:
            reader.dataset = self._reseed_datapipe(reader.dataset, start.shared_seed)
            reader.begin(start)
        except Exception as error:
            self._start_error = pickle_error(error, self.worker_id)
        self._started()

    def task(self, body: bytes) -> None:
        """Carry out one task of a blocking dataset."""
        if self._ended:
            return
        self._worked = True
        epoch, seq, slot, ring, index = wire.unpack_task(body)
        begin = perf_counter()
        bad: list[BadSample] = []
        try:
            reader = self._reader_or_error()
            if self._suspect is None:
                encoded = reader.fetch(pickle.loads(index), bad)
            else:
                with self._watched():
                    encoded = reader.fetch(pickle.loads(index), bad)
            if bad:
                self._tell_bad(epoch, seq, bad)
            place = self._place(encoded, slot, self._ring if ring == self._ring_number else None, index)
            self._answer(epoch, seq, place, encoded, reader.cursor(), perf_counter() - begin)
        except Exception as error:
            self._answer_error(epoch, seq, lambda: perf_counter() - begin, error, bad)

    async def task_async(self, body: bytes) -> None:
        """Carry out one task of an asynchronous dataset; several run at a time."""
        if self._ended:
            return
        self._worked = True
        epoch, seq, slot, ring_number, index = wire.unpack_task(body)
        ring = self._ring if ring_number == self._ring_number else None
        bad: list[BadSample] = []
        try:
            if self._context is not None:
                await self._entered()
            reader = self._reader_or_error()
            with self._watched(), Unasked("the dataset's"):
                encoded = await reader.fetch_async(pickle.loads(index), bad)
            # A task that outlived its epoch (it would not be cancelled) may not touch its slot: it is another's now.
            if epoch == self._epoch:
                if bad:
                    self._tell_bad(epoch, seq, bad)
                place = self._place(encoded, slot, ring, index)
                # Nothing was awaited since the fetch: no other task has read on.
                self._answer(epoch, seq, place, encoded, reader.cursor(), self._cpu_time())
        except Exception as error:
            if epoch == self._epoch and not self._ended:
                self._answer_error(epoch, seq, self._cpu_time, error, bad)

    def _cpu_time(self) -> float:
        """CPU seconds since the last call: what an asynchronous worker spent, beside waiting, since its last answer."""
        now = process_time()
        spent, self._cpu_mark = now - self._cpu_mark, now
        return spent

    def _reader_or_error(self) -> Reader:
        if self._start_error is not None:
            raise _StartError(self._start_error)
        assert self._reader is not None  # else there is an error
        return self._reader

    # -------------------------------------------------------------------------------------------- answers

    def _place(self, encoded: Encoded, slot: int, ring: WorkerRing | None, index: bytes) -> tuple[int, list[int]]:
        """Write the batch: to the slot, or to a segment of its own, whose descriptor comes back. Nothing is counted as
        made before it is written.
        """
        if not encoded.nbytes:
            return wire.NO_SLOT, []
        try:
            if ring is not None and slot >= 0 and encoded.nbytes <= ring.slot_bytes:
                encoded.write(ring.memory, ring.offset(slot, encoded.nbytes))
                return slot, []
            return wire.ONEOFF, [_write_oneoff(encoded)]
        except LoaderError:  # no memory
            raise
        except Exception as error:  # the default collation stacks samples where they are written
            if not self._setup.iterable:
                bare = bare_index(pickle.loads(index))
                add_note(error, collation_place(bare, batched=self._setup.auto_collation))
            raise

    def _answer(
        self, epoch: int, seq: int, place: tuple[int, list[int]], encoded: Encoded, cursor: bytes, busy: float
    ) -> None:
        self._tell_counts()
        slot, fds = place
        same = encoded.template == self._last_template
        result = wire.Result(epoch, seq, slot, encoded.nbytes, encoded.pickled, self._samples, busy, same, len(cursor))
        try:
            self.channel_send(wire.pack_result(result, encoded.template, cursor), fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._last_template = encoded.template

    def _tell_counts(self) -> None:
        if counts := COUNTERS.changes(self._counted):
            self.channel_send(wire.pack(wire.COUNTS, pickle.dumps(dict(counts), 5)))

    def _tell_bad(self, epoch: int, seq: int, bad: list[BadSample]) -> None:
        """Before the answer that the records belong to."""
        try:
            payload = pickle.dumps(bad, 5)
        except Exception:  # an index that does not pickle came here without pickling, by fork: its text must do
            payload = pickle.dumps([each._replace(index=repr(each.index)) for each in bad], 5)
        self.channel_send(wire.pack_answer(wire.BAD, epoch, seq, 0.0, payload))

    def _answer_error(
        self, epoch: int, seq: int, busy: Callable[[], float], error: Exception, bad: list[BadSample]
    ) -> None:
        self._tell_counts()
        if bad:
            self._tell_bad(epoch, seq, bad)
        if isinstance(error, NoSamples):
            cursor = self._reader.cursor() if self._reader is not None else b""
            self.channel_send(wire.pack_answer(wire.NOTHING, epoch, seq, busy(), cursor))
            return
        if self._setup_iterable() and isinstance(error, (StopIteration, StopAsyncIteration)):
            self._ended = True
            cursor = self._reader.last_cursor() if self._reader is not None else b""
            self.channel_send(wire.pack_answer(wire.EXHAUSTED, epoch, seq, busy(), cursor))
            return
        payload = error.payload if isinstance(error, _StartError) else pickle_error(error, self.worker_id)
        self.channel_send(wire.pack_answer(wire.ERROR, epoch, seq, busy(), payload))

    def _setup_iterable(self) -> bool:
        setup = getattr(self, "_setup", None)  # missing when the set-up itself did not unpickle
        return setup is not None and setup.iterable

    def channel_send(self, frame: bytes, fds: list[int] | None = None) -> None:
        """Send, waiting for room in the socket if need be."""
        if not self.channel.send(frame, fds or ()):
            while not self.channel.flush():
                select.select([], [self.channel.sock], [])


class _StartError(Exception):
    """Carries an error of start-up, pickled already, to the place where errors are answered."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload)
        self.payload = payload


def _write_oneoff(encoded: Encoded) -> int:
    if encoded.nbytes >= _ASKED_FOR:
        # Before the kernel is, which would rather kill somebody than say no.
        segment.check_room(encoded.nbytes, "one batch")
    fd = segment.create(encoded.nbytes)
    try:
        segment.reserve(fd, 0, encoded.nbytes)
        encoded.write(segment.map_segment(fd, encoded.nbytes), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def pickle_error(error: Exception, worker_id: int) -> bytes:
    """The error as the main process will raise it: ours as they are, others as torch wraps them."""
    where = f"in DataLoader worker process {worker_id}"
    notes = [] if isinstance(error, LoaderError) else take_notes(error)
    wrapper: Any = ExceptionWrapper(exc_info=(type(error), error, error.__traceback__), where=where)
    if isinstance(error, LoaderError):
        error.add_note(f"Raised {where}.\nOriginal {wrapper.exc_msg}")
        return pickle.dumps(error.with_traceback(None))
    # Not in torch's text, whose last line is the exception's own: `raise_worker_error` adds them again.
    wrapper.notes = [f"{note}, in worker {worker_id} (pid {os.getpid()})" for note in notes]
    try:
        data = pickle.dumps(wrapper)
        pickle.loads(data)
    except Exception:  # the type is local to a function, or does not unpickle: keep its name and text
        wrapper.exc_type = _LostType(type(error).__name__)
        data = pickle.dumps(wrapper)
    return data


class _LostType:
    """Stands for an exception type that cannot travel. It makes no exceptions; torch then makes a RuntimeError."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.__name__} could not be pickled")


def save_generators() -> bytes:
    """The states of `random`'s, numpy's and torch's process-global generators, pickled."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()), 5)


def restore_generators(saved: bytes) -> None:
    """Set the process-global generators to states that `save_generators` gave in another worker of ours."""
    ours, numpys, torchs = pickle.loads(saved)
    random.setstate(ours)
    np.random.set_state(numpys)
    torch.set_rng_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
