"""Describes a service's node as a plain dictionary, which the terminal view and the page show. Pure.

Data path: node_view -> [node_snapshot] -> top, page.

Rates are those between two readings; without an earlier reading, those since the node was started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncloader.live.snapshot import VERSION

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
