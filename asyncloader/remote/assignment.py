"""Decides which worker reads which range of which shard. Runs in the main process. Pure.

Data path: dataset.plan -> [assignment] -> worker_stream -> samples -> batch.

The plan of an epoch is a list of assignments; an assignment is a few shard ranges. Each worker asks for one assignment
after another and fills its batches from them. An assignment goes to one worker only, so no sample is read twice,
whatever the number of workers and shards.

*Order.* Assignments are given out as if a single process filled the workers' batches round-robin and let a worker ask
for its next assignment when it begins its last one. The result does not depend on timing, although the workers run
concurrently: every request has a *request order*, the tuple (batch, number, worker): the batch that the worker is
making, how many assignments it has had, and its index. Requests are answered in ascending request order. A request
therefore waits until every other worker either has a pending request with a later request order or has made enough
batches that it cannot ask earlier. A worker asks while it is still reading, so it rarely has to wait. (With
``in_order=False``, requests are answered as they arrive, and the order is unspecified.)

*End of the epoch.* A worker that cannot fill another batch *gives back* the ranges of its unfinished batch, and its
stream ends. They are assigned to a worker whose request has a later request order. Only the last running worker ends
with a short batch.

*Worker replacement.* The replacement of a dead worker repeats the requests whose answers were lost, and gets the same
answers.

*Resuming.* `AssignmentLog` records what was assigned to which worker, in order. Combined with the states of the workers
at their last delivered batches, it tells which assignments nobody had started: those count as never given. After
resuming, the workers repeat the requests that they had made since, with the same request order, and get the same
answers. If the end of a worker was delivered, what it gave back keeps its request order, so that requests with an
earlier one do not get it after resuming either.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any, NamedTuple

from asyncloader.remote.shard_splitting import CatalogRange

Assignment = tuple[CatalogRange, ...]
"""Shard ranges that one worker reads, one after another."""


class Reply(NamedTuple):
    """The answer to one request of a worker.

    Attributes:
        worker: the index of the worker that asked.
        number: how many assignments the worker had had when it asked.
        assignment: what to read next; None if there is nothing at the moment.
        over: the worker's stream ends here. Its unfinished batch goes to another worker, unless `last`.
        last: no other worker is running: the unfinished batch is the last batch of the epoch.
    """

    worker: int
    number: int
    assignment: Assignment | None = None
    over: bool = False
    last: bool = False


class StreamStart(NamedTuple):
    """The position from which one worker's stream begins or resumes.

    Attributes:
        asks: the first batch in which it may send a request. If a request was pending in the saved state, the batch of
            that request; otherwise the next batch.
        answers: the batch that its first answer to a task is about.
        taken: how many assignments it has had.
        over: its stream has ended.
    """

    asks: int = 0
    answers: int = 0
    taken: int = 0
    over: bool = False


class Returned(NamedTuple):
    """What a worker gave back when its stream ended.

    Attributes:
        order: the request order of its last request: batch, number of assignments, worker.
        assignment: the ranges of its unfinished batch.
    """

    order: tuple[int, int, int]
    assignment: Assignment

    @property
    def giver(self) -> int:
        """The index of the worker that gave it back."""
        return self.order[2]


_BY_ORDER = attrgetter("order")
_Order = tuple[int, int, int]  # batch, number, worker


class AssignmentLogState(NamedTuple):
    """The position of an epoch, as it is saved.

    Attributes:
        done: how many assignments of the plan were given out.
        back: assignments to give out before the rest of the plan, in order.
        returned: what was given back by workers whose end was delivered and is not assigned again yet, by request
            order.
        over: workers that must count as ended, because what they gave back belongs to another worker now.
    """

    done: int
    back: list[Assignment]
    returned: list[Returned]
    over: list[int]


class _Given(NamedTuple):
    worker: int
    number: int
    assignment: Assignment
    source: int  # index in the log's source; -1 if it was given back by a worker
    giver: int  # the worker that gave it back; -1 if it came from the source


class AssignmentLog:
    """Records what was assigned in one epoch, in order. Written by `ShardAssigner`; any thread may call `state`.

    Args:
        plan: the epoch's assignments, in order.
        done: how many of them were given out before the epoch was resumed.
        back: assignments to give out before the rest of the plan: taken, but not used, when the state was saved.
        returned: what had been given back and not assigned again when the state was saved, by request order.
    """

    def __init__(
        self,
        plan: Sequence[Assignment],
        done: int = 0,
        back: Sequence[Assignment] = (),
        returned: Sequence[Returned] = (),
    ) -> None:
        self._plan = plan
        self._done = done
        self._back = list(back)
        self._entries: list[_Given] = []
        self._returned = list(returned)
        self._takers: dict[int, _Given] = {}  # giver -> the entry that assigned it again

    def __len__(self) -> int:
        """Number of assignments in the source: `back` and the rest of the plan."""
        return len(self._back) + len(self._plan) - self._done

    @property
    def returned(self) -> tuple[Returned, ...]:
        """Everything that workers have given back so far, including what was assigned again."""
        return tuple(self._returned)

    def source(self, number: int) -> Assignment:
        """Return assignment `number` of the source."""
        if number < len(self._back):
            return self._back[number]
        return self._plan[self._done + number - len(self._back)]

    def note(self, worker: int, number: int, assignment: Assignment, source: int, giver: int) -> None:
        """Record that an assignment was given out."""
        entry = _Given(worker, number, assignment, source, giver)
        self._entries.append(entry)
        if giver >= 0:
            self._takers[giver] = entry

    def record_return(self, returned: Returned) -> None:
        """Record what a worker gave back at the end of its stream."""
        self._returned.append(returned)

    def state(self, taken: Sequence[int], ended: Collection[int] = ()) -> AssignmentLogState:
        """Return the position of the epoch for workers that have used `taken` assignments each.

        Takes time proportional to the assignments given since the oldest one that is not counted.

        Args:
            taken: the number of assignments per worker that count as used.
            ended: workers whose end was delivered. What a worker gave back counts as its own again if its end was not
                delivered and no other worker has used it.
        """
        had = [math.inf if worker in ended else number for worker, number in enumerate(taken)]
        over: list[int] = []
        returned: list[Returned] = []
        for each in reversed(self._returned[:]):
            taker = self._takers.get(each.giver)
            if taker is not None and taker.number < had[taker.worker]:
                over.append(each.giver)
                had[each.giver] = math.inf  # what it gave back may include its own last assignment
            elif each.giver in ended:
                returned.append(each)
        unseen = set(range(len(taken)))
        later: list[Assignment] = []
        used = -1
        for entry in reversed(self._entries[:]):
            used = max(used, entry.source)
            if entry.number < had[entry.worker]:
                unseen.discard(entry.worker)
            elif entry.source >= 0:
                later.append(entry.assignment)
            if not unseen and used >= 0 and entry.source >= 0:
                break  # returned ranges are assigned only after the source is used up
        used += 1
        back = [*reversed(later), *self._back[used:]]
        return AssignmentLogState(
            self._done + max(0, used - len(self._back)), back, sorted(returned, key=_BY_ORDER), sorted(over)
        )


class ShardAssigner:
    """Answers the requests of all workers of one epoch.

    Args:
        log: the epoch's log, with nothing recorded in it yet.
        workers: where each worker's stream begins.
        ordered: answer in request order, so that the result does not depend on timing.
    """

    def __init__(self, log: AssignmentLog, workers: Sequence[StreamStart], *, ordered: bool = True) -> None:
        self.log = log
        self._ordered = ordered
        self._used = 0  # assignments of the source
        self._returned = list(log.returned)  # by request order, if `ordered`
        self._batch = [worker.asks for worker in workers]  # the first batch in which the worker may still ask
        self._next = [worker.answers for worker in workers]
        self._first = [worker.taken for worker in workers]
        self._had: list[list[Assignment]] = [[] for _ in workers]
        self._refused: list[set[int]] = [
            set() for _ in workers
        ]  # numbers of the requests that were answered with nothing
        self._over: list[Reply | None] = [
            Reply(at, 0, over=True) if worker.over else None for at, worker in enumerate(workers)
        ]
        # Worker -> request order, and what it would give back.
        self._pending: dict[int, tuple[int, int, int, Assignment | None]] = {}
        self._gone: set[int] = set()  # workers whose pending request was sent by a process that has died
        self._asking: list[
            _Order
        ] = []  # a heap of pending requests; those that are not pending any more are dropped late
        # A heap of the earliest requests that workers without a pending one may send. Each such worker is in it once;
        # what it may send only becomes later, so an entry that is out of date is too early, and is mended at the top.
        self._reading = [self._earliest(worker) for worker in range(len(workers))]
        heapify(self._reading)
        self._listed = [True] * len(workers)
        self._running = sum(over is None for over in self._over)

    def __repr__(self) -> str:
        left = len(self.log) - self._used
        return f"<ShardAssigner {left} assignments left, {len(self._pending)} of {len(self._batch)} workers waiting>"

    def ask(self, worker: int, number: int, batch: int, left: Iterable[Sequence[Any]] | None = None) -> list[Reply]:
        """Handle a worker's request for its next assignment.

        Args:
            worker: the index of the worker that asks.
            number: how many assignments it has had.
            batch: the batch that it is making.
            left: None if the worker still has something to read. Otherwise it has nothing left to read and cannot fill
                its batch: the ranges of the samples in that batch.

        Returns:
            All replies that can be sent now, to this worker and to others.

        Raises:
            ValueError: this cannot be the worker's next request.
        """
        had = self._first[worker] + len(self._had[worker])
        if not self._first[worker] <= number <= had:
            raise ValueError(f"worker {worker} asks for its assignment number {number}, and has had {had}")
        # Such a request would wait for other workers to pass a batch that is never made. A single worker waits for no
        # other, and does not report its batches.
        if batch < 0 or (batch > self._next[worker] and len(self._next) > 1):
            raise ValueError(f"worker {worker} asks for batch {batch}, and makes its batch {self._next[worker]}")
        rest = None if left is None else _parse_ranges(left)
        # A replacement of a dead worker gets the reply that its predecessor got.
        if rest is None and number in self._refused[worker]:
            return [Reply(worker, number)]
        if number < had:
            return [Reply(worker, number, self._had[worker][number - self._first[worker]])]
        over = self._over[worker]
        if over is not None:
            return [over._replace(number=number)]
        self._pending[worker] = (batch, number, worker, rest)
        heappush(self._asking, (batch, number, worker))
        self._gone.discard(worker)
        return self._decide()

    def died(self, worker: int) -> None:
        """Note that the worker's process has died. Its pending request keeps its order, but the reply is not sent.

        The replacement asks again. A reply to the dead worker's request could otherwise be mistaken for the reply to a
        later request with the same number.
        """
        if worker in self._pending:
            self._gone.add(worker)

    def answered(self, worker: int) -> list[Reply]:
        """Note that the worker has answered a task, with a batch or an error. Return the replies that can be sent."""
        self._batch[worker] = self._next[worker] = self._next[worker] + 1
        return self._decide() if self._pending else []

    def _decide(self) -> list[Reply]:
        replies: list[Reply] = []
        while self._pending:
            order, worker = self._asking[0], self._asking[0][2]
            pending = self._pending.get(worker)
            if pending is None or pending[:3] != order:
                heappop(self._asking)
                continue
            if self._ordered and self._may_come_before(order):
                break
            heappop(self._asking)
            del self._pending[worker]
            reply = self._reply(order, pending[3])
            if not self._listed[worker]:
                self._listed[worker] = True
                heappush(self._reading, self._earliest(worker))
            if worker in self._gone:
                self._gone.remove(worker)
            else:
                replies.append(reply)
        return replies

    def _earliest(self, worker: int) -> _Order:
        """The request order of the earliest request that this worker may still send."""
        return self._batch[worker], self._first[worker] + len(self._had[worker]), worker

    def _may_come_before(self, order: _Order) -> bool:
        """Return whether a worker may still send a request with an earlier request order."""
        reading = self._reading
        while reading and reading[0] < order:
            worker = reading[0][2]
            if worker in self._pending or self._over[worker] is not None:
                heappop(reading)
                self._listed[worker] = False
            elif reading[0] != (now := self._earliest(worker)):
                heapreplace(reading, now)
            else:
                return True
        return False

    def _reply(self, order: tuple[int, int, int], left: Assignment | None) -> Reply:
        _, number, worker = order
        last = self._running == 1
        assignment, source, giver = self._first_left(order, whatever=last and left is not None)
        if assignment is not None:
            self._had[worker].append(assignment)
            self.log.note(worker, number, assignment, source, giver)
            return Reply(worker, number, assignment)
        if left is None:
            self._refused[worker].add(number)
            return Reply(worker, number)
        reply = self._over[worker] = Reply(worker, number, over=True, last=last)
        self._running -= 1
        if left and not last:
            returned = Returned(order, left)
            if self._ordered:
                insort(self._returned, returned, key=_BY_ORDER)
            else:
                self._returned.append(returned)
            self.log.record_return(returned)
        return reply

    def _first_left(self, order: tuple[int, int, int], *, whatever: bool) -> tuple[Assignment | None, int, int]:
        """Return the next assignment for a request, its index in the source (or -1), and the worker that gave it back
        (or -1).

        `whatever`: take what was given back regardless of request order, because no other worker is running.
        """
        if self._used < len(self.log):
            self._used += 1
            return self.log.source(self._used - 1), self._used - 1, -1
        if self._returned and (whatever or not self._ordered or self._returned[0].order < order):
            returned = self._returned.pop(0)
            return returned.assignment, -1, returned.giver
        return None, -1, -1


def _parse_ranges(plain: Iterable[Sequence[Any]]) -> Assignment:
    """Parse the ranges that a worker gave back.

    Raises:
        ValueError: they are not valid ranges.
    """
    if not isinstance(plain, list | tuple) or not all(map(_is_range, plain)):  # nothing else of it is looked at
        raise ValueError("a worker gives back what is no list of ranges")
    return tuple(CatalogRange(*each) for each in plain)


def _is_range(plain: Any) -> bool:
    if not isinstance(plain, list | tuple) or len(plain) != len(CatalogRange._fields):
        return False
    shard, start, stop, sync = plain
    numbers = (shard, start, 0 if stop is None else stop)
    return all(type(number) is int and number >= 0 for number in numbers) and type(sync) is bool
