"""Describes a service's node as a plain dictionary, which the terminal view and the page show. Pure.

Data path: node_view -> [node_snapshot] -> top, page.

Rates are those between two readings; without an earlier reading, those since the node was started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncloader.live.snapshot import VERSION

_MOST_ROWS = 200
"""Sessions in a dictionary, at most: a line of it, and the page, have a bounded size."""


class ConnectionReading(NamedTuple):
    """A worker connection of a loader.

    Attributes:
        number: of the connection; no number is used twice.
        worker: the worker's number in its loader.
        pid: the process that makes its batches.
        relayed: whether the node sends its batches, and so can count them.
        batches: that were sent.
        bytes: of these.
        in_work: tasks that its process has.
        waiting: tasks that its process does not have yet.
    """

    number: int
    worker: int
    pid: int
    relayed: bool
    batches: int
    bytes: int
    in_work: int
    waiting: int


class SessionReading(NamedTuple):
    """A loader that reads from the node.

    Attributes:
        loader: the name that it gave itself.
        peer: its address, or "this machine".
        dataset: the definition, and its arguments.
        batches: that were sent to it so far, over connections that have ended, too.
        bytes: of these.
        ring_bytes: size of the rings that hold its batches.
        unsent_bytes: of messages that it has not read yet.
        most_bytes: that these may take; None: no limit.
        connections: its workers.
    """

    loader: str
    peer: str
    dataset: str
    batches: int
    bytes: int
    ring_bytes: int
    unsent_bytes: int
    most_bytes: int | None
    connections: Sequence[ConnectionReading]


class ProcessReading(NamedTuple):
    """A worker process.

    Attributes:
        pid: its process id.
        dataset: the definition, and its arguments.
        ready: it has made its dataset.
        connections: worker connections that it serves.
        tasks: that it has carried out, of a blocking dataset.
        busy_s: seconds that it was at these.
        state: as `stacks.process_state` says it.
    """

    pid: int
    dataset: str
    ready: bool
    connections: int
    tasks: int
    busy_s: float
    state: str


class NodeReading(NamedTuple):
    """A node at a moment.

    Attributes:
        pid: its process.
        time: seconds since 1970.
        clock: seconds of a clock that never goes back.
        up_s: seconds since it was started.
        addresses: at which it listens.
        draining: it takes no more loaders.
        problem: why a definition cannot be served now; empty if all can.
        figures: as its ``/metrics``.
        sessions: the loaders.
        processes: of all datasets.
    """

    pid: int
    time: float
    clock: float
    up_s: float
    addresses: Sequence[str]
    draining: bool
    problem: str
    figures: dict[str, float]
    sessions: Sequence[SessionReading]
    processes: Sequence[ProcessReading]


class NodeSnapshots:
    """Makes the dictionaries of successive readings of one node."""

    def __init__(self) -> None:
        self._clock: float | None = None
        # By loader, and by process: the counts of the reading before.
        self._sessions: dict[str, SessionReading] = {}
        self._processes: dict[int, ProcessReading] = {}

    def take(self, now: NodeReading) -> dict[str, Any]:
        """Describe a reading. The dictionary has plain values only, and can be written as JSON."""
        interval = max(1e-9, now.up_s if self._clock is None else now.clock - self._clock)
        sessions = [self._session(each, interval) for each in now.sessions]
        shown = sessions[:_MOST_ROWS]
        processes = [self._process(each, interval) for each in now.processes]
        self._clock = now.clock
        self._sessions = {each.loader: each for each in now.sessions}
        self._processes = {each.pid: each for each in now.processes}
        return {
            "version": VERSION,
            "kind": "node",
            "name": f"node at {', '.join(now.addresses)}" if now.addresses else "node",
            "pid": now.pid,
            "time": now.time,
            "state": "draining" if now.draining else "serving" if now.addresses else "starting",
            "ok": not now.problem,
            "problem": now.problem,
            "rates": {
                "interval_s": interval,
                "batches_per_s": sum(each["batches_per_s"] for each in sessions),
                "bytes_per_s": sum(each["bytes_per_s"] for each in sessions),
            },
            "totals": {"up_s": now.up_s, **now.figures},
            "sessions": shown,
            "sessions_left_out": len(sessions) - len(shown),
            "processes": processes,
        }

    def _session(self, now: SessionReading, interval: float) -> dict[str, Any]:
        before = self._sessions.get(now.loader)
        batches = now.batches - (before.batches if before else 0)
        nbytes = now.bytes - (before.bytes if before else 0)
        relayed = [each for each in now.connections if each.relayed]
        return {
            "loader": now.loader,
            "peer": now.peer,
            "dataset": now.dataset,
            "workers": len(now.connections),
            "relayed": len(relayed),
            "batches": now.batches,
            "bytes": now.bytes,
            # Not below 0: another loader may have come under the same name.
            "batches_per_s": max(0, batches) / interval,
            "bytes_per_s": max(0, nbytes) / interval,
            "in_work": sum(each.in_work for each in relayed),
            "waiting": sum(each.waiting for each in relayed),
            "ring_bytes": now.ring_bytes,
            "unsent_bytes": now.unsent_bytes,
            "most_bytes": now.most_bytes,
            "connections": [each._asdict() for each in sorted(now.connections, key=lambda each: each.worker)],
        }

    def _process(self, now: ProcessReading, interval: float) -> dict[str, Any]:
        before = self._processes.get(now.pid)
        busy = now.busy_s - (before.busy_s if before else 0.0)
        tasks = now.tasks - (before.tasks if before else 0)
        return {
            "pid": now.pid,
            "dataset": now.dataset,
            "ready": now.ready,
            "connections": now.connections,
            "tasks": now.tasks,
            "tasks_per_s": max(0, tasks) / interval,
            "busy_frac": min(1.0, max(0.0, busy) / interval),
            "state": now.state,
        }
