"""Decides which worker reads which range of which shard. Runs in the main process. Pure.

Data path: dataset.plan -> [assignment] -> worker_stream -> samples -> batch.

The plan of an epoch is a list of assignments; an assignment is a few shard ranges. Each worker requests assignments one
after another and fills its batches from them. An assignment goes to one worker only, so no sample is read twice,
whatever the number of workers and shards.

*Order.* Assignments are given out as if a single process filled the workers' batches round-robin and let a worker
request its next assignment when it begins the last assignment that it has. The result does not depend on timing,
although the workers run concurrently: every request has a *request order*, the tuple (batch, number, worker): the batch
that the worker is making, the number of assignments that it has had, and its index. Requests are answered in ascending
request order. A request therefore waits until every other worker either has a pending request with a later request
order or has made enough batches that it cannot send an earlier request. A worker sends its request while it is still
reading, so it rarely waits. (With ``in_order=False``, requests are answered as they arrive, and the order is
unspecified.)

*End of the epoch.* A worker that cannot fill another batch *gives back* the ranges of its unfinished batch, and its
stream ends. They are assigned to a worker whose request has a later request order. Only the last running worker ends
with a short batch.

*Worker replacement.* The replacement of a dead worker repeats the requests whose answers were lost, and gets the same
answers.

*Resuming.* `AssignmentLog` records which assignment each worker got, in order. With the states of the workers at their
last delivered batches, it gives the assignments that no worker had started: those count as never given. After resuming,
the workers repeat the requests that they had made since, with the same request order, and get the same answers. If the
end of a worker was delivered, the ranges that it gave back keep its request order, so that requests with an earlier
request order do not get them after resuming either.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from asyncloader.remote.shard_splitting import Assignment, CatalogRange, is_catalog_range


class Reply(NamedTuple):
    """The answer to one request of a worker.

    Attributes:
        worker: the index of the worker that sent the request.
        number: the number of assignments that the worker had had before.
        assignment: the ranges to read next; None if no assignment is left at the moment.
        over: the worker's stream ends. Its unfinished batch goes to another worker, unless `last`.
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
        answers: the number of the batch with which it answers its first task.
        taken: the number of assignments that it has had.
        over: its stream has ended.
    """

    asks: int = 0
    answers: int = 0
    taken: int = 0
    over: bool = False


class Returned(NamedTuple):
    """The ranges that a worker gave back when its stream ended.

    Attributes:
        order: the request order of its last request: batch, number of assignments, worker.
        assignment: the ranges of its unfinished batch.
    """

    order: tuple[int, int, int]
    assignment: Assignment

    @property
    def giver(self) -> int:
        """The index of the worker that gave the ranges back."""
        return self.order[2]


_BY_ORDER = attrgetter("order")
_Order = tuple[int, int, int]  # batch, number, worker


class AssignmentLogState(NamedTuple):
    """The position of an epoch, as it is saved.

    Attributes:
        done: the number of assignments of the plan that were given out.
        back: assignments to give out before the rest of the plan, in order.
        returned: the ranges that workers gave back whose end was delivered, and that are not assigned again yet, by
            request order.
        over: workers that must count as ended, because the ranges that they gave back belong to another worker now.
    """

    done: int
    back: list[Assignment]
    returned: list[Returned]
    over: list[int]


class _Given(NamedTuple):
    worker: int
    number: int
    assignment: Assignment
    source: int  # index in the log's source; -1 if a worker gave the assignment back
    giver: int  # the worker that gave it back; -1 if it came from the source


class AssignmentLog:
    """Records the assignments that are given out in one epoch, in order. `ShardAssigner` writes it; any thread may call
    `state`.

    Args:
        plan: the epoch's assignments, in order.
        done: the number of assignments that were given out before the epoch was resumed.
        back: assignments to give out before the rest of the plan: taken, but not used, when the state was saved.
        returned: the ranges that had been given back, and not assigned again, when the state was saved, by request
            order.
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
        self._takers: dict[int, _Given] = {}  # giver -> the entry that assigned its ranges again

    def __len__(self) -> int:
        """Number of assignments in the source: `back` and the rest of the plan."""
        return len(self._back) + len(self._plan) - self._done

    @property
    def returned(self) -> tuple[Returned, ...]:
        """All ranges that workers have given back so far, including those that were assigned again."""
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
        """Record the ranges that a worker gave back at the end of its stream."""
        self._returned.append(returned)

    def state(self, taken: Sequence[int], ended: Collection[int] = ()) -> AssignmentLogState:
        """Return the position of the epoch for workers that have used `taken` assignments each.

        Takes time proportional to the number of assignments that were given since the oldest unused assignment.

        Args:
            taken: the number of assignments per worker that count as used.
            ended: workers whose end was delivered. The ranges that a worker gave back count as its own again if its end
                was not delivered and no other worker has used them.
        """
        had = [math.inf if worker in ended else number for worker, number in enumerate(taken)]
        over: list[int] = []
        returned: list[Returned] = []
        # Copied: another thread may be adding to the list. Backwards, because a taker may have given the same ranges
        # back in turn: its own end must be known before that of the worker it took them from.
        for each in reversed(self._returned[:]):
            taker = self._takers.get(each.giver)
            if taker is not None and taker.number < had[taker.worker]:
                over.append(each.giver)
                # All of its assignments count as used: the ranges that it gave back may be of its last assignment.
                had[each.giver] = math.inf
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
        ordered: reply in request order, so that the result does not depend on timing.
    """

    def __init__(self, log: AssignmentLog, workers: Sequence[StreamStart], *, ordered: bool = True) -> None:
        self.log = log
        self._ordered = ordered
        self._used = 0  # assignments of the source
        self._returned = list(log.returned)  # by request order, if `ordered`
        self._batch = [worker.asks for worker in workers]  # the first batch in which the worker may send a request
        self._next = [worker.answers for worker in workers]  # the batch that the worker is making
        self._first = [worker.taken for worker in workers]
        self._had: list[list[Assignment]] = [[] for _ in workers]
        # Numbers of the requests that were answered without an assignment.
        self._refused: list[set[int]] = [set() for _ in workers]
        self._over: list[Reply | None] = [
            Reply(at, 0, over=True) if worker.over else None for at, worker in enumerate(workers)
        ]
        # Worker -> request order, and the ranges that it would give back.
        self._pending: dict[int, tuple[int, int, int, Assignment | None]] = {}
        self._gone: set[int] = set()  # workers whose pending request was sent by a process that has died
        self._running = sum(over is None for over in self._over)

    def __repr__(self) -> str:
        left = len(self.log) - self._used
        return f"<ShardAssigner {left} assignments left, {len(self._pending)} of {len(self._batch)} workers waiting>"

    def ask(self, worker: int, number: int, batch: int, left: Iterable[Sequence[Any]] | None = None) -> list[Reply]:
        """Handle a worker's request for its next assignment.

        Args:
            worker: the index of the worker.
            number: the number of assignments that it has had.
            batch: the batch that it is making.
            left: None if the worker still has samples to read. Otherwise no samples are left, and it cannot fill its
                batch: the ranges of the samples in that batch.

        Returns:
            All replies that can be sent now, to this worker and to others.

        Raises:
            ValueError: the worker cannot have sent this as its next request.
        """
        had = self._first[worker] + len(self._had[worker])
        if not self._first[worker] <= number <= had:
            raise ValueError(f"worker {worker} asks for its assignment number {number}, and has had {had}")
        # Such a request would wait for other workers to pass a batch that is never made. A single worker does not wait
        # for others, and does not report its batches.
        if batch < 0 or (batch > self._next[worker] and len(self._next) > 1):
            raise ValueError(f"worker {worker} asks for batch {batch}, and makes its batch {self._next[worker]}")
        if left is not None and not (isinstance(left, list | tuple) and all(is_catalog_range(each) for each in left)):
            raise ValueError("a worker gives back what is no list of ranges")
        rest = None if left is None else tuple(CatalogRange(*each) for each in left)
        # The replacement of a dead worker gets the reply that its predecessor got: the batches must be the same as
        # without the death.
        if rest is None and number in self._refused[worker]:
            return [Reply(worker, number)]
        if number < had:
            return [Reply(worker, number, self._had[worker][number - self._first[worker]])]
        over = self._over[worker]
        if over is not None:
            return [over._replace(number=number)]
        self._pending[worker] = (batch, number, worker, rest)
        self._gone.discard(worker)
        return self._decide()

    def died(self, worker: int) -> None:
        """Note that the worker's process has died. Its pending request keeps its order, but the reply is not sent.

        The replacement repeats the request. It could otherwise mistake a reply to the dead worker's request for the
        reply to a later request with the same number.
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
            order = min(pending[:3] for pending in self._pending.values())
            # Answered now, this request would get an assignment that belongs to the earlier request.
            if self._ordered and self._may_come_before(order):
                break
            worker = order[2]
            reply = self._reply(order, self._pending.pop(worker)[3])
            # The assignment is the dead worker's nevertheless: its replacement gets it when it repeats the request.
            if worker in self._gone:
                self._gone.remove(worker)
            else:
                replies.append(reply)
        return replies

    def _earliest(self, worker: int) -> _Order:
        """Return the request order of the earliest request that this worker may still send."""
        return self._batch[worker], self._first[worker] + len(self._had[worker]), worker

    def _may_come_before(self, order: _Order) -> bool:
        """Return whether a worker may still send a request with an earlier request order."""
        return any(
            self._earliest(worker) < order
            for worker, over in enumerate(self._over)
            if over is None and worker not in self._pending
        )

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
        # The last worker keeps its unfinished batch: no other worker could fill a batch with it.
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

        `whatever`: take returned ranges regardless of request order, because no other worker is running.
        """
        if self._used < len(self.log):
            self._used += 1
            return self.log.source(self._used - 1), self._used - 1, -1
        if self._returned and (whatever or not self._ordered or self._returned[0].order < order):
            returned = self._returned.pop(0)
            return returned.assignment, -1, returned.giver
        return None, -1, -1
