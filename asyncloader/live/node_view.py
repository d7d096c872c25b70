"""Opens the view of a service's node: a Unix socket that `asyncloader top` reads.

Data path: node -> [node_view] -> live_server -> terminal view, page.

It runs in the node's event loop. Without a reader it costs nothing; with one it describes the node each second, as a
plain dictionary. Rates are those between two readings; without an earlier reading, those since the node was started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from time import monotonic, time
from typing import Any

from asyncloader.base.peer_text import line_of
from asyncloader.live.live_server import LiveServer
from asyncloader.live.snapshot import VERSION
from asyncloader.service.node.admission import as_text
from asyncloader.service.node.server import Node
from asyncloader.service.node.sessions import Session
from asyncloader.service.node.worker_processes import HostProcesses
from asyncloader.workers.stacks import process_state

_log = logging.getLogger("asyncloader")

_PERIOD_S = 1.0
_NAME, _DATASET = 100, 200  # characters of a loader's name, and of a dataset's, that are shown


class NodeView:
    """The view of a node, from `open` to `close`.

    Args:
        node: the node.

    Attributes:
        addresses: at which it listens; to be set once it does.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._began = monotonic()
        self._server = LiveServer(self._lines)
        self.addresses: Sequence[str] = ()

    async def open(self) -> None:
        """Open the socket. If that fails, the node goes on without a view, and its log says why."""
        if not hasattr(socket, "AF_UNIX"):
            return
        try:
            await self._server.listen_at_socket()
        except OSError as error:
            _log.info("`asyncloader top` cannot show this node: %s", error)

    @property
    def path(self) -> str:
        """The path of the socket; empty if it has none."""
        return "" if self._server.path is None else str(self._server.path)

    async def close(self) -> None:
        """Close the socket, and end its connections. Idempotent."""
        await self._server.close()

    async def _lines(self) -> AsyncGenerator[bytes]:
        snapshots = NodeSnapshots()
        while True:
            yield json.dumps(snapshots.take(self._read())).encode()
            await asyncio.sleep(_PERIOD_S)

    def _read(self) -> dict[str, Any]:
        node, now = self._node, monotonic()
        return {
            "pid": os.getpid(),
            "time": time(),
            "clock": now,  # which never goes back
            "addresses": self.addresses,
            "draining": node.draining,
            "problem": line_of(node.problem(), _DATASET),
            "totals": {"up_s": now - self._began, **node.figures()},
            "sessions": {name: _read_session(each) for name, each in node.sessions.items()},
            "processes": {each["pid"]: each for host in node.hosts for each in _processes(host)},
        }


def _processes(host: HostProcesses) -> Iterator[dict[str, Any]]:
    dataset = _dataset(f"{host.setup.target} with {as_text(host.setup.arguments)}")
    for each in host.read():
        yield {**each._asdict(), "dataset": dataset, "state": process_state(each.pid)}


def _dataset(text: str) -> str:
    return line_of(text, _DATASET)


def _read_session(session: Session) -> dict[str, Any]:
    quota = session.quota
    return {
        "loader": line_of(quota.name, _NAME),
        "peer": session.peer,
        "dataset": _dataset(session.dataset),
        "batches": session.batches,  # also over connections that have ended
        "bytes": session.sent_bytes,
        "ring_bytes": quota.ring_bytes,
        "unsent_bytes": quota.unsent_bytes,
        "most_bytes": quota.most_bytes,
        "connections": [
            {
                "number": number,
                "worker": each.worker,
                "pid": each.pid,
                "relayed": each.end.relayed,
                "batches": each.end.batches,
                "bytes": each.end.sent_bytes,
                "in_work": each.end.in_work,
                "waiting": each.end.waiting,
            }
            for number, each in session.connections.items()
        ],
    }


_MOST_ROWS = 200
"""Sessions in a dictionary, at most: a line of it, and the page, have a bounded size."""


class NodeSnapshots:
    """Makes the dictionaries of successive readings of one node."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {"sessions": {}, "processes": {}}

    def take(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a reading. The dictionary has plain values only, and can be written as JSON.

        Args:
            now: what `NodeView` has read: loaders by their names, processes by their ids, and counts in them that only
                grow.
        """
        before, self._before = self._before, now
        interval = max(1e-9, now["clock"] - before["clock"] if "clock" in before else now["totals"]["up_s"])
        sessions = [_session(each, before["sessions"].get(key, {}), interval) for key, each in now["sessions"].items()]
        processes = [
            _process(each, before["processes"].get(key, {}), interval) for key, each in now["processes"].items()
        ]
        addresses, shown = now["addresses"], sessions[:_MOST_ROWS]
        return {
            "version": VERSION,
            "kind": "node",
            "name": f"node at {', '.join(addresses)}" if addresses else "node",
            "pid": now["pid"],
            "time": now["time"],
            "state": "draining" if now["draining"] else "serving" if addresses else "starting",
            "ok": not now["problem"],
            "problem": now["problem"],
            "rates": {
                "interval_s": interval,
                "batches_per_s": sum(each["batches_per_s"] for each in sessions),
                "bytes_per_s": sum(each["bytes_per_s"] for each in sessions),
            },
            "totals": now["totals"],
            "sessions": shown,
            "sessions_left_out": len(sessions) - len(shown),
            "processes": processes,
        }


def _session(now: Mapping[str, Any], before: Mapping[str, Any], interval: float) -> dict[str, Any]:
    relayed = [each for each in now["connections"] if each["relayed"]]  # whose batches the node sends, and can count
    return {
        **now,
        "workers": len(now["connections"]),
        "relayed": len(relayed),
        "batches_per_s": _grown(now, before, "batches") / interval,
        "bytes_per_s": _grown(now, before, "bytes") / interval,
        "in_work": sum(each["in_work"] for each in relayed),
        "waiting": sum(each["waiting"] for each in relayed),
        "connections": sorted(now["connections"], key=lambda each: each["worker"]),
    }


def _process(now: Mapping[str, Any], before: Mapping[str, Any], interval: float) -> dict[str, Any]:
    found = {**now, "tasks_per_s": _grown(now, before, "tasks") / interval}
    return {**found, "busy_frac": min(1.0, _grown(now, before, "busy_s") / interval)}


def _grown(now: Mapping[str, Any], before: Mapping[str, Any], key: str) -> float:
    # Not below 0: another loader, or process, may have come under the same name.
    grown: float = now[key] - before.get(key, 0)
    return max(0, grown)
