"""One rank's epoch over a cluster's nodes, event by event: the real scheduler, with a simulated clock and workers.

A worker carries out its tasks one after the other. A node that is killed is noticed at once; a node whose network is
cut, after the time that a loader needs. Its workers continue at other nodes, which are slower for it, until the node is
back. The consumer takes a batch per step. Each batch must be delivered once, in its place.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncloader.epoch.hedging import Hedging
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.errors import WorkerDied
from asyncloader.events import (
    Assign,
    Completed,
    Deliver,
    Delivered,
    Died,
    Drop,
    Finish,
    Late,
    Offered,
    Pull,
    Replace,
    Replaced,
    SamplerEnded,
    Started,
)

NOTICED_S = {"kill": 0.005, "cut": 2.6}
"""Seconds until a loader notices the loss."""
ANEW_S = 0.03
"""Seconds until a worker has connected to another node."""
GONE_S = 120.0
"""Seconds until a lost node is back."""
DAY = 86_400.0


@dataclass(frozen=True)
class Case:
    """The options of a simulated epoch.

    Attributes:
        batches: number of batches in the epoch.
        nodes: number of nodes.
        workers: logical workers, spread over the nodes.
        credits: tasks that each worker may have outstanding.
        window: batches that may be ready behind a missing batch.
        step_s: seconds that the consumer takes for a batch.
        spare: the rate at which the workers can make batches, divided by the rate at which the consumer takes them.
        node_days: days until a node is lost, on average; every second lost node is killed, the others are cut off.
        slow: share of tasks that take 20 times as long.
        hedged: whether a late task is also given to a second node.
        in_order: whether batches are delivered in order, or as soon as they are made.
        seed: of all random numbers.
    """

    batches: int
    nodes: int = 16
    workers: int = 64
    credits: int = 2
    window: int = 64
    step_s: float = 0.1
    spare: float = 1.25
    node_days: float = math.inf
    slow: float = 0.0
    hedged: bool = True
    in_order: bool = True
    seed: int = 0


class Outcome(NamedTuple):
    """The results of a simulated epoch.

    Attributes:
        delivered: number of batches delivered.
        lost: batches that were never delivered.
        doubled: batches that were delivered twice, or out of their place.
        again: tasks that were assigned a second time, to a second worker or after a loss.
        nodes_lost: how often a node was lost.
        stalled: share of the steps that waited for a batch.
        waited: share of the time that steps waited.
        longest_s: the longest wait.
    """

    delivered: int
    lost: int
    doubled: int
    again: int
    nodes_lost: int
    stalled: float
    waited: float
    longest_s: float


class _Epoch:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = random.Random(f"asyncloader epoch {case.seed}")
        self.scheduler = Scheduler(
            workers=case.workers,
            credits=case.credits,
            in_order=case.in_order,
            assignment="least_loaded",
            reorder_window=case.window,
        )
        self.hedging = Hedging()
        self.waits_late = False  # an event is scheduled for the moment at which a task is late
        self.seen: set[int] = set()  # batches that were delivered, where they have no order
        self.now = 0.0
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.number = 0  # number of events: events of the same moment happen in their order
        self.offered = 0
        self.life = [0] * case.workers  # answers of a worker's earlier life do not count
        self.free_at = [0.0] * case.workers
        self.node_of = [worker % case.nodes for worker in range(case.workers)]
        self.up = [True] * case.nodes
        self.ready: deque[Deliver] = deque()
        self.sent: set[int] = set()  # sequence numbers that were assigned and not delivered
        self.again = self.nodes_lost = self.delivered = self.doubled = self.stalled = 0
        self.waiting_since: float | None = 0.0
        self.waited = self.longest = 0.0
        self.finished = False
        # Log-normal with the mean at which the workers make `spare` batches for each batch that is taken.
        slowness = 1 + 19 * case.slow
        self.mean = case.workers * case.step_s / (case.spare * slowness)

    def at(self, time: float, what: Any, *arguments: Any) -> None:
        """Schedule an event."""
        self.number += 1
        heapq.heappush(self.events, (time, self.number, what, arguments))

    def run(self) -> Outcome:
        """Run the epoch's events, and return the outcome."""
        case = self.case
        if case.node_days < math.inf:
            self.at(self._until_next_loss(), self._node_is_lost)
        self._carry_out(self.scheduler.handle(Started()))
        while self.events and not self.finished:
            self.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        steps = max(1, self.delivered)
        return Outcome(
            self.delivered,
            case.batches - self.delivered,
            self.doubled,
            self.again,
            self.nodes_lost,
            self.stalled / steps,
            self.waited / max(self.now, 1e-9),
            self.longest,
        )

    # ------------------------------------------------------------------------------------------- the scheduler

    def _carry_out(self, actions: Any) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            if isinstance(action, Assign):
                self._assign(action)
            elif isinstance(action, Deliver):
                self.ready.append(action)
                if self.waiting_since is not None:
                    self._take()
            elif isinstance(action, Pull):
                for _ in range(action.number):
                    if self.offered == self.case.batches:
                        todo.extend(self.scheduler.handle(SamplerEnded()))
                        break
                    self.offered += 1
                    todo.extend(self.scheduler.handle(Offered(self.offered - 1)))
            elif isinstance(action, Replace):
                self.at(self.now + ANEW_S, self._back, action.worker)
            elif isinstance(action, Finish):
                self.finished = True
            elif isinstance(action, Drop):
                pass
            else:
                raise RuntimeError(f"nobody expected {action!r}")  # noqa: TRY004 - the scheduler is wrong, no type

    def _assign(self, action: Assign) -> None:
        worker, task = action.worker, action.task
        self.hedging.assigned(task.seq, worker, str(self.node_of[worker]), self.now)
        if self.scheduler.hedged(task.seq) and self.scheduler.unanswered(worker) > 1:
            self.hedging.costs()
        self.again += task.seq in self.sent
        self.sent.add(task.seq)
        seconds = self.rng.lognormvariate(math.log(self.mean) - 0.045, 0.3) * len(self.up) / sum(self.up)
        if self.case.slow and self.rng.random() < self.case.slow:
            seconds *= 20
        done = self.free_at[worker] = max(self.now, self.free_at[worker]) + seconds
        self.at(done, self._done, worker, self.life[worker], task)

    def _done(self, worker: int, life: int, task: Any) -> None:
        if life == self.life[worker]:
            self.hedging.answered(task.seq, worker, self.now)
            self._carry_out(self.scheduler.handle(Completed(worker, task.seq, task.index)))
            self._mind_late()

    def _mind_late(self) -> None:
        """Give a late task to a second worker, as `LateTasks` does, with this clock."""
        scheduler, head = self.scheduler, self.scheduler.head
        if not self.case.hedged or self.hedging.limit is None or not scheduler.starved or head is None:
            return
        seq, worker = head[0].seq, head[1]
        at = None if self.waits_late or scheduler.hedged(seq) else self.hedging.late_at(seq, worker)
        if at is None:
            return
        if at > self.now:
            self.waits_late = True
            self.at(at, self._ring)
            return
        others = [each for each, node in enumerate(self.node_of) if node != self.node_of[worker]]
        self._carry_out(scheduler.handle(Late(others, not self.hedging.may_cost)))

    def _ring(self) -> None:
        self.waits_late = False
        self._mind_late()

    # ---------------------------------------------------------------------------------------------- the consumer

    def _take(self) -> None:
        """Take a batch, or begin to wait for one."""
        case = self.case
        if not self.ready:
            self.waiting_since = self.now
            return
        if self.waiting_since is not None:
            wait = self.now - self.waiting_since
            if self.delivered:  # the first batch is not waited for in a step
                self.stalled += wait > 0
                self.waited += wait
                self.longest = max(self.longest, wait)
            self.waiting_since = None
        batch = self.ready.popleft()
        if case.in_order:
            self.doubled += batch.outcome != self.delivered
        else:
            self.doubled += batch.outcome in self.seen
            self.seen.add(batch.outcome)
        self.delivered += 1
        self.sent.discard(batch.seq)
        self.at(self.now + case.step_s, self._take)
        self._carry_out(self.scheduler.handle(Delivered(batch.seq)))
        self._mind_late()

    # ------------------------------------------------------------------------------------------- losses of nodes

    def _until_next_loss(self) -> float:
        return self.now + self.rng.expovariate(self.case.nodes / (self.case.node_days * DAY))

    def _node_is_lost(self) -> None:
        self.at(self._until_next_loss(), self._node_is_lost)
        node = self.rng.randrange(self.case.nodes)
        if not self.up[node] or sum(self.up) == 1:
            return
        self.up[node] = False
        self.nodes_lost += 1
        kind = "kill" if self.nodes_lost % 2 else "cut"
        for worker in range(self.case.workers):
            if self.node_of[worker] == node:
                self.life[worker] += 1  # its tasks in hand will not be answered
                self.at(self.now + NOTICED_S[kind], self._noticed, worker, self.life[worker])
        self.at(self.now + GONE_S, self._node_is_back, node)

    def _noticed(self, worker: int, life: int) -> None:
        if life == self.life[worker]:
            error = WorkerDied(worker, 0, None, "the connection is gone")
            self.hedging.died(worker)
            self._carry_out(self.scheduler.handle(Died(worker, error, lost=True)))

    def _back(self, worker: int) -> None:
        self.node_of[worker] = self.rng.choice([node for node, there in enumerate(self.up) if there])
        self.life[worker] += 1
        self.free_at[worker] = self.now
        self._carry_out(self.scheduler.handle(Replaced(worker)))

    def _node_is_back(self, node: int) -> None:
        self.up[node] = True


def simulate(case: Case) -> Outcome:
    """Simulate an epoch of this case."""
    return _Epoch(case).run()
