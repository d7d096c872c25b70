"""One worker's stream of a remote dataset: from the assignments of shard ranges to the samples of batches.

Data path: assignment -> prefetch, reading -> [worker_stream] -> workers.fetch.stream_fetcher -> collate.

A worker stream makes one batch at a time. Only bytes are read ahead (`prefetch`): samples are taken when a batch needs
them, so the position of the stream depends on its batches alone and is the same in every run.

Its state describes the position after its last batch: the ranges that are still to be read, with offsets; the ranges
from which the shuffle buffer is filled again; and the pending request. The size of the state does not grow with the
epoch.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from asyncloader.base.shielding import shielded, wait_until_done
from asyncloader.errors import StateError, is_about_sample
from asyncloader.formats import Sample
from asyncloader.formats.rows import Rows
from asyncloader.remote.assignment import ShardAssigner
from asyncloader.remote.batch_rows import BatchRows
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import Open, RangePrefetcher, RangeReading
from asyncloader.remote.shard_splitting import CatalogRange, bytes_left
from asyncloader.remote.shuffle import ShuffleBlocks
from asyncloader.workers.fetch.assignment_client import AssignmentReply, AssignmentSource

ASK_AHEAD = 12 << 20
"""The next assignment is requested when at most this number of bytes of the current assignment is left to read (unknown
sizes count as 0). Also the bytes after the current range that are opened early: a round trip of 50 ms at 250 MB/s per
worker.
"""


class SampleRun(NamedTuple):
    """Samples that were read one after the other.

    Attributes:
        samples: the samples.
        resumes: the positions after them.
        shard: index of their shard in the catalog.
        start: where the range of the first sample begins.
        sync: `start` may lie inside another sample.
    """

    samples: Sequence[Sample]
    resumes: Sequence[int]
    shard: int
    start: int
    sync: bool

    def range(self, first: int, after: int) -> CatalogRange:
        """Return the range that contains exactly the samples from `first` to before `after`."""
        resumes = self.resumes
        start, sync = (resumes[first - 1], False) if first else (self.start, self.sync)
        return CatalogRange(self.shard, start, resumes[after - 1], sync)


Taken: TypeAlias = tuple[SampleRun, int]
"""A sample: its run, and its index there. Samples and ranges of their own for each would take longer than to read."""


def ranges_of(taken: Iterable[Taken]) -> Iterator[CatalogRange]:
    """Return the ranges of the samples, in order; one for those that follow each other in a run."""
    run: SampleRun | None = None
    first = after = 0
    for each, index in taken:
        if each is run and index == after:
            after += 1
            continue
        if run is not None:
            yield run.range(first, after)
        run, first, after = each, index, index + 1
    if run is not None:
        yield run.range(first, after)


def samples_of(taken: Sequence[Taken]) -> Sequence[Sample]:
    """Return the samples, in order. Rows of tables are made later, when they are asked for."""
    rows = [(run.samples.table, run.samples.within[index]) for run, index in taken if isinstance(run.samples, Rows)]
    return BatchRows(rows) if len(rows) == len(taken) else [run.samples[index] for run, index in taken]


def merge_ranges(shard_ranges: Iterable[CatalogRange]) -> list[CatalogRange]:
    """Join adjacent ranges of the same shard."""
    found: list[CatalogRange] = []
    _extend(found, shard_ranges)
    return found


def _extend(found: list[CatalogRange], shard_ranges: Iterable[CatalogRange]) -> None:
    for shard_range in shard_ranges:
        if found and found[-1].shard == shard_range.shard and found[-1].stop == shard_range.start:
            found[-1] = found[-1]._replace(stop=shard_range.stop)
        else:
            found.append(shard_range)


class WorkerStream:
    """Reads the ranges that are assigned to one worker. Not for concurrent use: one `take` at a time.

    Args:
        shards: the catalog that the ranges refer to.
        open: opens a range for reading.
        source: provides the assignments.
        shuffle: samples per block of the shuffle buffer; 0: no shuffling.
    """

    def __init__(self, shards: Sequence[Shard], open: Open, source: AssignmentSource, shuffle: int) -> None:
        self._shards = shards
        self._open = open
        self._source = source
        self._blocks: ShuffleBlocks[Taken] | None = None if not shuffle else ShuffleBlocks(shuffle, source.key)
        self._batch = -1
        self._taken = 0  # assignments that were started
        self._asked: int | None = None  # the batch in which the next assignment was requested; None: not requested yet
        self._dry = False  # that request was answered without an assignment
        self._over = False
        self._gave_back = False
        self._todo: deque[CatalogRange] = deque()  # ranges left to read; the first begins where reading continues
        self._reading: RangeReading | None = None  # of the first range in `_todo`
        self._ahead = RangePrefetcher(shards, open, ASK_AHEAD)
        self._answer: asyncio.Future[AssignmentReply] | None = None  # reply to the pending request
        self._assigned: Sequence[Sequence[Any]] | None = None  # the next assignment, if it is known
        self._fault: Exception | None = None  # reading the current range failed
        self._block: list[CatalogRange] = []  # the ranges that the shuffle buffer's blocks were filled from
        self._filling: list[CatalogRange] = []
        self._carry: list[Taken] = []  # taken for a batch that failed; used for the next batch
        self._given: list[CatalogRange] = []  # returned for the current batch
        self._bad: list[CatalogRange] = []  # bad samples reported during the current batch
        self._lost: list[CatalogRange] = []  # ends of ranges that could not be read, found during the current batch
        self._saved: dict[str, Any] | None = None
        # The current batch failed because a shard could not be read: the next batch continues it.
        self._unfinished = False
        # The range that was opened a second time, because its error was from before the consumer needed it. Not a third
        # time: the error is new then, and is raised.
        self._again: CatalogRange | None = None

    # ------------------------------------------------------------------------------------------------ batches

    def next_batch(self, *, again: bool = False) -> None:
        """Begin the next batch; or the same `again`, which a store has interrupted. It contains the samples that were
        taken for a batch whose shard could not be read.
        """
        self._batch += not again
        if not (again or self._unfinished):
            self._given, self._bad, self._lost = [], [], []
        self._unfinished = False

    @property
    def gave_back(self) -> bool:
        """Whether the stream has ended and given back everything that was taken or reported for the current batch.

        Then another worker handles those samples and errors, and the current batch must be discarded.
        """
        return self._gave_back

    async def refill(self) -> None:
        """After resuming: read the samples again that had been taken, but not returned, when the state was saved.

        May be called again after it has raised. The stream cannot continue without all of these samples.

        Raises:
            StateError: the shards have changed.
            ShardError, TransportError: the shards cannot be read.
        """
        if self._saved is not None:
            await self._refill(self._saved)
            self._saved = None

    async def take(self, size: int) -> Sequence[Sample]:
        """Return `size` samples for the current batch; fewer only at the end of the epoch. See `samples_of`.

        May be called again for the same batch, to replace samples that turned out to be bad, and after it has raised:
        samples that were taken before the error are kept for the next call.

        Raises:
            StopAsyncIteration: no samples are left; see `gave_back`.
            ShardError, ObjectNotFound: a sample, or the rest of a range, cannot be read. The next call continues after
                it.
            TransportError: the store cannot be read, and the error is not about the samples (`is_about_sample`). The
                next call continues at the position of the error, and the samples of this batch become the next batch's.
            Exception: an error of `refill`, which runs first if it has not succeeded yet.
        """
        await self.refill()
        if self._over:
            raise StopAsyncIteration
        if not self._taken and self._asked is None and not self._dry:
            self._ask()
        out, self._carry = self._carry, []
        try:
            while len(out) < size:
                got = await self._some(size - len(out))
                out += got
                if got:
                    continue
                # Nothing is left to read. With the ranges of this batch, the assigner either gives another assignment,
                # or ends this stream and gives the ranges to another worker.
                answer = await self._source.ask(self._taken, self._batch, self._present(out))
                if answer.assignment is not None:
                    self._begin(answer.assignment)
                    continue
                self._over = True
                # Another worker delivers these samples now: they must not be returned here, too.
                if not answer.last:
                    out, self._gave_back = [], True
                break
        except BaseException as error:
            self._carry = out
            self._unfinished = not is_about_sample(error)
            raise
        if not out:
            raise StopAsyncIteration
        self._given += ranges_of(out)
        return samples_of(out)

    def _present(self, out: Iterable[Taken]) -> list[CatalogRange]:
        """Return the ranges of the current batch, including `out`, with its bad samples at their positions.

        The unread ends of ranges come last: so a worker that cannot read them either does not lose the samples after
        them.
        """
        shard_ranges = [*self._given, *ranges_of(out)]
        for bad in reversed(self._bad):
            behind = (
                at
                for at, shard_range in enumerate(shard_ranges)
                if (shard_range.shard, shard_range.start) == (bad.shard, bad.stop)
            )
            shard_ranges.insert(next(behind, len(shard_ranges)), bad)
        return merge_ranges(shard_ranges) + self._lost

    async def _some(self, most: int) -> list[Taken]:
        """Return 1 to `most` samples; none if all assigned ranges are read."""
        blocks = self._blocks
        if blocks is None:
            run = await self._pull(most)
            return [] if run is None else _each(run)
        blocks.begin(most)
        if not blocks.left:
            await self._fill(blocks, 0)
            self._block, self._filling = self._filling, []
            if not blocks.swap():
                return []
        number = min(most, blocks.left)
        await self._fill(blocks, number)
        return blocks.take(number)

    async def _fill(self, blocks: ShuffleBlocks[Taken], giving: int) -> None:
        while (missing := blocks.missing(giving)) and (run := await self._pull(missing)):
            blocks.filling += _each(run)
            _extend(self._filling, [run.range(0, len(run.samples))])

    # ------------------------------------------------------------------------------------------------ reading

    async def _pull(self, most: int) -> SampleRun | None:
        """Return 1 to `most` samples in the order of the ranges; None if all assignments are read and none is left."""
        while not self._dry:
            if not self._todo:
                await self._next_assignment()
                continue
            reading = self._reading
            if reading is None:
                reading = self._reading = self._ahead.open(self._todo[0])
                self._look_ahead()
            if run := self._pull_found(reading, most):
                return run
            if self._fault is not None:
                fault, self._fault = self._fault, None
                if is_about_sample(fault):
                    self._lost.append(self._todo[0])
                    await self._end_range()
                else:
                    self._reading = None
                    await reading.aclose()
                    # The range failed some time ago, when it was opened early: the store may answer again by now.
                    if reading.outdated and self._again != self._todo[0]:
                        self._again = self._todo[0]
                        continue
                try:
                    raise fault
                finally:
                    del fault  # its traceback refers to this frame: without this, both stay until a garbage collection
            try:
                await reading.more()
            except StopAsyncIteration:
                if not reading.bad:
                    await self._end_range()
            except Exception as error:
                # Raised in the next turn: samples that were found before the error are returned first.
                self._fault = error
            except BaseException as error:
                # The next call opens the range again, at the current position. The cancellation has ended the reading,
                # unless it came when the samples had already arrived. GeneratorExit lets nothing be awaited.
                self._reading = None
                if isinstance(error, asyncio.CancelledError):
                    await reading.aclose()
                raise
        return None

    def _pull_found(self, reading: RangeReading, most: int) -> SampleRun | None:
        bad = reading.bad
        # Samples before the first bad sample are returned first, so that its error has its place in the order.
        limit = bad[0].resume if bad else None
        shard, start, stop, sync = self._todo[0]
        samples, resumes = reading.take(most, limit)
        if samples:
            self._todo[0] = CatalogRange(shard, resumes[-1], stop, False)
            self._ask_near_end()
            self._look_ahead()
            return SampleRun(samples, resumes, shard, start, sync)
        if bad and limit is not None:
            self._bad.append(CatalogRange(shard, start, limit, sync))
            self._todo[0] = CatalogRange(shard, limit, stop, False)
            raise bad.popleft()
        return None

    async def _end_range(self) -> None:
        reading, self._reading = self._reading, None
        self._todo.popleft()
        self._ask_near_end()
        if reading is not None:
            await reading.aclose()

    def _look_ahead(self) -> None:
        """Open ranges after the current range early, including those of the next assignment if it is known."""
        if self._todo:
            behind = [*islice(self._todo, 1, None), *map(CatalogRange._make, self._assigned or ())]
            self._ahead.look(self._todo[0], behind)

    # ------------------------------------------------------------------------------------------------- assignments

    def _ask(self) -> None:
        """Request the next assignment."""
        self._asked = self._batch
        self._ask_again(self._batch)

    def _ask_again(self, batch: int) -> None:
        # Sent at once, before this batch: after it, the assigner relies on that no request of this batch comes.
        self._source.prepare(self._taken, batch)
        self._answer = asyncio.ensure_future(self._source.ask(self._taken, batch, None))
        self._answer.add_done_callback(self._note_answer)

    def _note_answer(self, answer: asyncio.Future[AssignmentReply]) -> None:
        # Not for an earlier request: its assignment has begun, and must not be opened a second time.
        if answer is self._answer and not answer.cancelled() and answer.exception() is None:
            self._assigned = answer.result().assignment
            self._look_ahead()

    async def _next_assignment(self) -> None:
        if self._answer is None:
            self._ask()
        assert self._answer is not None
        # Shielded: if the caller is cancelled, the request stays pending, and the next call waits for its answer.
        answer = await shielded(self._answer)
        self._answer = self._asked = None
        if answer.assignment is None:
            self._dry = True
        else:
            self._begin(answer.assignment)

    def _begin(self, assignment: Iterable[Sequence[Any]]) -> None:
        self._todo.extend(map(CatalogRange._make, assignment))
        self._assigned = None
        self._taken += 1
        self._dry = False
        self._ask_near_end()

    def _ask_near_end(self) -> None:
        if self._asked is None and not self._dry and self._left() <= ASK_AHEAD:
            self._ask()

    def _left(self) -> int:
        """Return the bytes until the end of the assignment; unknown sizes count as 0."""
        return sum(bytes_left(self._shards[shard_range.shard], shard_range) or 0 for shard_range in self._todo)

    async def aclose(self) -> None:
        """Stop reading."""
        answer, self._answer = self._answer, None
        reading, self._reading = self._reading, None
        # All is closed, also if the caller is cancelled meanwhile.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._ahead.aclose)
            if reading is not None:
                stack.push_async_callback(reading.aclose)
            if answer is not None:
                answer.cancel()
                await wait_until_done([answer])

    # -------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain values."""
        # Before `refill` has succeeded, the position is still the loaded position.
        if self._saved is not None:
            return self._saved
        blocks = self._blocks
        kept = self._given if self._unfinished else []
        state: dict[str, Any] = {
            "batch": self._batch,
            "taken": self._taken,
            "asked": self._asked,
            "dry": self._dry,
            "over": self._over,
            "todo": [*map(list, self._todo)],
            "carry": [*map(list, merge_ranges([*kept, *ranges_of(self._carry)]))],
            "blocks": None,
        }
        if blocks is not None:
            state["blocks"] = {
                "number": blocks.number,
                "aim": blocks.aim,
                "given": blocks.given,
                "size": len(blocks.block),
                "block": [*map(list, self._block)],
                "filling": [*map(list, self._filling)],
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`; `refill` fills the shuffle buffer again."""
        self._batch, self._taken, self._asked = state["batch"], state["taken"], state["asked"]
        self._dry, self._over = state["dry"], state["over"]
        self._todo.extend(map(CatalogRange._make, state["todo"]))
        self._saved = state
        # This request was pending when the state was saved: it keeps its batch, and so its place in the order.
        if self._asked is not None and not self._over:
            self._ask_again(self._asked)

    async def _refill(self, state: dict[str, Any]) -> None:
        """Read the samples again that had been taken and not returned."""
        self._carry = await self._read_again(state["carry"])
        saved = state["blocks"]
        if self._blocks is None or saved is None:
            return
        self._block = [*map(CatalogRange._make, saved["block"])]
        self._filling = [*map(CatalogRange._make, saved["filling"])]
        block = await self._read_again(saved["block"])
        if len(block) != saved["size"]:
            raise StateError(
                f"the shuffle buffer held {saved['size']} samples when the state was saved, and their ranges hold "
                f"{len(block)} now: the shards are not the same"
            )
        filling = await self._read_again(saved["filling"])
        self._blocks.restore(saved["number"], saved["aim"], saved["given"], block, filling)

    async def _read_again(self, shard_ranges: Iterable[Sequence[Any]]) -> list[Taken]:
        taken: list[Taken] = []
        for each in shard_ranges:
            shard_range = CatalogRange(*each)
            reading = RangeReading(self._open, self._shards[shard_range.shard], shard_range)
            shard, start, _, sync = shard_range
            try:
                while True:
                    await reading.more()
                    samples, resumes = reading.take(sys.maxsize, None)
                    taken += _each(SampleRun(samples, resumes, shard, start, sync))
                    start, sync = resumes[-1], False
            except StopAsyncIteration:
                pass
            finally:
                await reading.aclose()
        return taken


def _each(run: SampleRun) -> list[Taken]:
    return [(run, index) for index in range(len(run.samples))]


class LocalAssignments:
    """An `AssignmentSource` for a worker stream that runs in the main process.

    Args:
        assigner: of the epoch.
        key: the seed of the shuffle buffer.
    """

    def __init__(self, assigner: ShardAssigner, key: int) -> None:
        self._assigner = assigner
        self.key = key

    def prepare(self, number: int, batch: int) -> None:
        """Do nothing, because `ask` returns at once."""

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> AssignmentReply:
        """Return the assigner's reply, like `AssignmentSource.ask`."""
        (reply,) = self._assigner.ask(0, number, batch, left)
        return AssignmentReply(reply.assignment, reply.over, reply.last)
