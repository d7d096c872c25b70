"""Carries out one worker's tasks: from a received frame to the answer.

Data path: channel -> [task_runner: fetch -> collate -> ring slot] -> channel.

`TaskRunner` holds a worker's state: its copy of the dataset, its ring, its process-global random numbers. How frames
are waited for is decided in `worker.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate

from asyncloader.base.events import PackedCursor, SkippedSample, bare_index
from asyncloader.errors import LoaderError, RingMemoryError
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.slow_samples import SlowSamples
from asyncloader.workers.error_answers import ErrorAnswers
from asyncloader.workers.fetch.assignment_client import WorkerAssignments
from asyncloader.workers.fetch.context import DatasetContext, UnexpectedCancellation, warn_of_exit
from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_state import bytes_of, is_stateful
from asyncloader.workers.fetch.error_notes import note_collation
from asyncloader.workers.fetch.error_pickle import PickledStartError
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.seeding import GlobalDrawCheck, restore_rng_state, save_rng_state
from asyncloader.workers.fetch.setup import (
    LateSetup,
    WorkerSetup,
    call_worker_init,
    install_worker_info,
    reseeded_datapipe,
    seed_worker,
)
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.ipc.codec import Encoded
from asyncloader.workers.ipc.collate import Collator, count_samples, use_private_memory
from asyncloader.workers.ipc.ring import WorkerRing
from asyncloader.workers.memory_limit import PrivateMemory
from asyncloader.workers.message_codec import PICKLE, MessageCodec
from asyncloader.workers.processor_use import ProcessorUse
from asyncloader.workers.stream_readers import Identify, StreamIdentities, StreamReaders, read_copies
from asyncloader.workers.task_spans import TracedTasks

_log = logging.getLogger("asyncloader")

_LOOK_S = 0.02  # between two looks at how much CPU time was used: one takes 5 us


class TaskRunner(ErrorAnswers):
    """Carries out tasks and answers them.

    Args:
        worker_id: its number.
        channel: to the main process.
        setup: the common set-up.
        recorder: gets the worker's counts and times.
        entered: when the process began.
        codec: how values come and go.
        draw_check: of this process, where several workers share it; its use of the CPUs is then no worker's own.

    An error at start-up (a dataset that does not unpickle, `worker_init_fn`, `__aenter__`, `__iter__`) is kept and
    answers every task, while torch answers only the first with it. After such a first answer `next()` begins the epoch
    again: persistent workers then try `worker_init_fn`, `__aenter__` and `__iter__` again, and never read without.
    """

    # Whether no other code than this worker's runs in the process, so that its global generators are the worker's.
    _alone = True
    # The errors of the user's code that are answers. Others end the process.
    _caught: tuple[type[BaseException], ...] = (Exception,)
    _clock = staticmethod(process_time)

    def __init__(
        self,
        worker_id: int,
        channel: Channel,
        setup: WorkerSetup | LateSetup,
        recorder: Recorder,
        entered: float,
        codec: MessageCodec = PICKLE,
        draw_check: GlobalDrawCheck | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._draw_check = draw_check
        self._codec = codec
        self._time, self._slow = recorder.time, SlowSamples(recorder.slow)
        self._traced = TracedTasks(recorder, shared=draw_check is not None)
        self._processor_use = ProcessorUse(recorder, self._clock) if draw_check is None else None
        self._look_at = 0.0  # when to record it again
        self._starting = self._fresh = True  # no epoch has begun, no batch was made
        self._ready = perf_counter()
        self._time("start_import", self._ready - entered)
        self.channel = channel
        self.stopped = self.asynchronous = False
        self._ring: WorkerRing | None = None
        self._ring_number = -1
        self._assignments = WorkerAssignments(channel.send_all, codec)
        self._encoder = codec.encoder()
        self._last_template = b""
        self._samples = self._epoch = 0
        self._cpu_mark = self._clock()
        self._ended = False  # this worker's copy of an iterable dataset is exhausted in this epoch
        self._start_error: bytes | None = None
        self._reader: DatasetReader | StreamReaders | None = None
        self._identities: StreamIdentities | None = None  # of the streams, where the worker serves several
        self._context: DatasetContext | None = None  # entered in the event loop before the first task
        self._private_memory: PrivateMemory | None = None
        self._memory_limit = 0
        self._initialized = False  # `worker_init_fn` has returned
        self._worked = False  # a task was carried out: the worker may leave from now on
        self._enter()
        self.channel.send_all(wire.pack(wire.READY))  # from here on the user's code may run
        try:
            self._setup = setup if isinstance(setup, WorkerSetup) else setup.load()
            self._start(self._setup)
        except self._caught as error:
            self._start_error = self._dump_start_error(error)
        if not self.opens:
            try:
                self._send_started()
            except BaseException:
                # The caller has no runner that it could release.
                self.release()
                raise

    def _enter(self) -> None:
        """Prepare the process."""
        # The name and the number of threads that torch's own workers have. The function is private: torch has no public
        # one.
        torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.set_num_threads(1)
        use_private_memory()

    def _seed(self, setup: WorkerSetup) -> int:
        """Seed the generators of the worker. Returns its seed."""
        return seed_worker(setup.base_seed, self.worker_id)

    def _watched(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that fetches the batches of a blocking dataset."""
        return fetch

    def _install_info(self, setup: WorkerSetup, seed: int, dataset: Any) -> None:
        """Make `get_worker_info` work in the worker."""
        install_worker_info(self.worker_id, setup.num_workers, seed, dataset)

    @property
    def opens(self) -> bool:
        """Whether `open` must be awaited before the worker has started."""
        return self._context is not None and self._start_error is None

    async def open(self) -> None:
        """Enter the dataset's context."""
        await self._enter_context()
        self._send_started()

    async def _enter_context(self) -> None:
        if self._context is None or self._start_error is not None:
            return
        try:
            await self._context.open()
        except asyncio.CancelledError:
            raise  # of the task that waits here
        except self._caught as error:
            self._start_error = self._start_error or self._dump_start_error(error)

    async def close(self) -> None:
        """Exit the dataset's context, and close what its code has opened, in bounded time."""
        warn_of_exit(None if self._context is None else await self._context.close())
        if isinstance(self._reader, DatasetReader):
            await self._reader.aclose_resources()

    def close_reader(self) -> None:
        """End a blocking dataset's threads, and close what its code has opened. Nothing may be fetched afterwards."""
        if self._reader is not None:
            self._reader.close_resources()
            self._reader.close()

    def release(self) -> None:
        """Let go of the dataset, its threads, the ring and all descriptors: the collector would come late."""
        self.close_reader()
        if self._processor_use is not None:
            self._processor_use.close()
        # The process may live on: its sink must not, and it refers back to the recorder.
        self._traced.close()
        # The reader refers back to this object, by the function that collates: a cycle.
        self.__dict__.clear()

    def _send_started(self) -> None:
        """Report that start-up is over: with its error, or with the cursors of the dataset's copies."""
        if self._starting:
            self._starting = False
            self._time("start_dataset", perf_counter() - self._ready)
        # Of an asynchronous dataset none is known yet: it begins with the first task.
        cursors: list[bytes] = []
        if self._start_error is None and self._reader is not None and not self.asynchronous:
            try:
                cursors = list(map(bytes_of, self._reader.first_cursors()))
            except self._caught as error:  # the user's `state_dict`
                self._start_error = self._dump_start_error(error)
        self.channel.send_all(wire.pack_started(self._epoch, self._start_error or b"", cursors))

    def _dump_start_error(self, error: BaseException) -> bytes:
        # A `for` loop would take it for the end of an empty epoch, or end the process.
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            error = not_the_end(error, "the worker's start-up code")
        return self._codec.dump_error(error, self.worker_id)

    def _start(self, setup: WorkerSetup) -> None:
        self._epoch = self._assignments.epoch = setup.attachment
        seed = self._seed(setup)
        start = setup.starts[self.worker_id]
        dataset = reseeded_datapipe(setup.dataset, start.shared_seed)

        def read(copy: Any, number: int) -> DatasetReader:
            return DatasetReader(
                setup,
                copy,
                self._make_collate(setup),
                worker_id=number,
                in_worker=True,
                assignments=self._assignments,
                time=self._time,
                samples=self._slow,
                pack_cursor=self._codec.cursor_packer(),
                alone=self._alone,
                draw_check=self._draw_check,
            )

        reader = self._reader = read_copies(setup, self.worker_id, dataset, read, self._identify)
        self._fetch = self._watched(reader.fetch)
        # Before `worker_init_fn`, which may ask `get_worker_info`.
        self._install_info(setup, seed, dataset)
        self.asynchronous = reader.asynchronous
        self._initialize(setup)
        reader.begin(start)
        if setup.rng_state:
            # After the start-up code, which draws random numbers of its own: the predecessor's go on from here.
            (restore_rng_state if self._identities is None else self._identities.restore)(setup.rng_state)
        if setup.memory_limit is not None:
            # Last: the growth is measured from here, without the dataset.
            self._memory_limit, self._private_memory = setup.memory_limit, PrivateMemory()

    def _identify(self, setup: WorkerSetup, datasets: Mapping[int, Any]) -> Identify:
        """Return what makes the worker that of a stream."""
        self._identities = StreamIdentities(setup, datasets)
        return self._identities

    def _initialize(self, setup: WorkerSetup) -> None:
        """Call `worker_init_fn`: as the worker, or as each of its streams."""
        # Until the call has returned: where it raises, the next epoch repeats it.
        self._initialized = False
        assert self._reader is not None
        init = partial(call_worker_init, setup.worker_init_fn)
        if isinstance(self._reader, StreamReaders):
            self._reader.initialize(init)
        else:
            init(self.worker_id)
        context = self._reader.context()
        self._context = context if context.needed else None
        self._initialized = True

    def _make_collate(self, setup: WorkerSetup) -> Callable[[Any], Encoded]:
        """Return a function that collates fetched samples to an encoded batch."""
        collate_fn, auto = setup.collate_fn, setup.auto_collation
        collator = Collator(self._encoder) if collate_fn is torch_collate.default_collate else None

        def collate(data: Any) -> Encoded:
            self._samples = count_samples(data) if auto else 1
            return self._encoder.encode(collate_fn(data)) if collator is None else collator.collate(data)

        return collate

    # --------------------------------------------------------------------------------------------- frames

    def control(self, kind: int, body: bytes) -> None:
        """Handle a frame that is not a task."""
        if kind == wire.RING:
            number, slots, slot_bytes = wire.unpack_ring(body)
            try:
                self._ring = WorkerRing(self.channel.take_fd(), slots, slot_bytes)
                self._ring_number = number
            except RingMemoryError as error:
                # The worker goes on: each batch gets a segment of its own, or this error if even that is too large.
                _log.warning("worker %d cannot use its ring, and is slower without it: %s", self.worker_id, error)
        elif kind == wire.RESET:
            self._reset(body)
        elif kind == wire.ASSIGNMENT:
            self._assignments.answered(body)
        elif kind == wire.STOP:
            self.stopped = True

    @property
    def over_memory_limit(self) -> bool:
        """Whether this worker exceeds its memory limit and should leave instead of carrying out the task just received.
        It leaves only on a task: after the epoch's end the main process would not take over its RNG state.
        """
        memory = self._private_memory
        if memory is None or self._ended or not self._worked or memory.growth() <= self._memory_limit:
            return False
        # If no other worker could continue its stream, this worker must go on.
        return self._setup.replays or (self._reader is not None and self._reader.can_resume)

    def leave(self) -> None:
        """Announce that this worker leaves. Call it with no task in progress, and take none afterwards."""
        # In seeded mode random numbers belong to samples: there is no state to hand over.
        save = save_rng_state if self._identities is None else self._identities.save
        self.channel.send_all(wire.pack(wire.LEAVING, b"" if self._setup.seeded is not None else save()))

    def _reset(self, body: bytes) -> None:
        epoch, payload = wire.unpack_reset(body)
        self._epoch = self._assignments.epoch = epoch
        self._ended = False
        # Before the dataset begins, which may take long: from here on no older task writes, so the main process may use
        # the slots of those again.
        self.channel.send_all(wire.pack_reset(wire.RESET_DONE, epoch))
        reader = self._reader
        if reader is None:
            return  # the set-up did not unpickle: that error answers every task
        if self._setup.iterable or is_stateful(reader.dataset):
            self._worked = False  # no cursor of its dataset is known before its first answer in this epoch
        self._start_error = None
        start = self._codec.load_start(payload)
        try:
            if not self._initialized:
                self._initialize(self._setup)  # it raised; no epoch is read without it
            reader.dataset = reseeded_datapipe(reader.dataset, start.shared_seed)
            reader.begin(start)
        except self._caught as error:
            self._start_error = self._dump_start_error(error)
        self._send_started()

    def task(self, body: bytes) -> None:
        """Carry out one task of a blocking dataset."""
        # The end of the dataset has voided this task: the main process would take an answer for a fault.
        if self._ended:
            return
        self._worked = True
        epoch, seq, slot, ring, sent, packed = wire.unpack_task(body)
        begin = perf_counter()
        if sent < 0.0 or self._traced.log is not None:
            sent = self._traced.begin(sent, begin)
        records: list[SkippedSample] = []
        try:
            index = self._codec.loads(packed)
            reader = self._reader_or_error()
            encoded = self._fetch(index, records)
            # Before the answer: the main process takes records for those of the task that is answered next.
            if records:
                self._send_skipped_samples(epoch, seq, records)
            fetched = perf_counter()
            written = self._write_batch(encoded, slot, self._ring if ring == self._ring_number else None, index)
            self._record(sent, begin, fetched)
            self._answer(epoch, seq, written, encoded, reader.cursor(), perf_counter() - begin)
        except self._caught as error:
            self._answer_error(epoch, seq, lambda: perf_counter() - begin, error, records)

    async def task_async(self, body: bytes) -> None:
        """Carry out one task of an asynchronous dataset; several run concurrently."""
        if self._ended:
            return
        self._worked = True
        epoch, seq, slot, ring_number, sent, packed = wire.unpack_task(body)
        begin = perf_counter()
        if sent < 0.0 or self._traced.log is not None:
            sent = self._traced.begin(sent, begin)
        # A task begins after all frames that came with it were handled, and these may have brought a newer ring. The
        # task's slot is in the ring that its frame names; if that has been replaced, the batch gets a segment of its
        # own.
        ring = self._ring if ring_number == self._ring_number else None
        records: list[SkippedSample] = []
        try:
            index = self._codec.loads(packed)
            if self._context is not None:
                await self._enter_context()
            reader = self._reader_or_error()
            assert isinstance(reader, DatasetReader)  # several streams are blocking ones
            with UnexpectedCancellation("the dataset's"):
                encoded = await reader.fetch_async(index, records)
            # A task that ignored its cancellation and outlived its epoch must not write: its slot has been given away.
            if epoch == self._epoch:
                if records:
                    self._send_skipped_samples(epoch, seq, records)
                fetched = perf_counter()
                written = self._write_batch(encoded, slot, ring, index)
                self._record(sent, begin, fetched)
                # Nothing was awaited since the fetch, so no other task has advanced the dataset.
                self._answer(epoch, seq, written, encoded, reader.cursor(), self._cpu_time())
        except asyncio.CancelledError:
            raise  # the loop's own: one of the dataset's came as another error
        except self._caught as error:
            # Otherwise the task was voided, by a RESET or by the end of the dataset, while it ran.
            if epoch == self._epoch and not self._ended:
                self._answer_error(epoch, seq, self._cpu_time, error, records)

    def _cpu_time(self) -> float:
        """CPU seconds since the last call: the busy time of an asynchronous worker since its last answer."""
        now = self._clock()
        spent, self._cpu_mark = now - self._cpu_mark, now
        return spent

    def _reader_or_error(self) -> DatasetReader | StreamReaders:
        if self._start_error is not None:
            raise PickledStartError(self._start_error)
        assert self._reader is not None  # or there would be a start error
        return self._reader

    # -------------------------------------------------------------------------------------------- answers

    def _write_batch(self, encoded: Encoded, slot: int, ring: WorkerRing | None, index: Any) -> tuple[int, list[int]]:
        """Write the batch to the slot, or to a one-off segment. Returns the slot and the segment's descriptor, if any.

        The default collation stacks samples only here, so its errors are raised here, too.
        """
        if self._samples < 0:
            self._samples = len(bare_index(index))
        if not encoded.nbytes:
            return wire.NO_SLOT, []
        try:
            if ring is not None and slot >= 0 and encoded.nbytes <= ring.slot_bytes:
                encoded.write(ring.memory, ring.offset(slot, encoded.nbytes))
                return slot, []
            return wire.ONEOFF, [segment.written(encoded.nbytes, encoded.write)]
        except LoaderError:  # out of memory
            raise
        except Exception as error:
            if not self._setup.iterable:
                note_collation(error, bare_index(index), batched=self._setup.auto_collation)
            raise

    def _answer(
        self,
        epoch: int,
        seq: int,
        written: tuple[int, list[int]],
        encoded: Encoded,
        cursor: PackedCursor | None,
        busy: float,
    ) -> None:
        slot, fds = written
        data = b"" if cursor is None else cursor.data
        same = encoded.template == self._last_template
        result = wire.Result(
            *(epoch, seq, slot, encoded.nbytes, encoded.pickled, self._samples, busy, same, len(data), perf_counter())
        )
        try:
            frame = wire.pack_result(result, encoded.template, data)
            if self._traced.log is not None:
                frame = self._traced.before(frame, self.channel, epoch, seq)
            self.channel.send_all(frame, fds)
        finally:
            for fd in fds:
                # The frame carries a duplicate.
                os.close(fd)
        # Only now: the next answer may leave out no template that was not sent.
        self._last_template = encoded.template

    def _record(self, sent: float, begin: float, fetched: float) -> None:
        """Record the stages of a task that was received at `begin` and had its batch at `fetched`."""
        if not self._fresh:  # else it waited for the worker's start
            self._time("queue", begin - sent)
        self._fresh = False
        now = perf_counter()
        self._time("write", now - fetched)
        if self._processor_use is not None and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._processor_use.record()
