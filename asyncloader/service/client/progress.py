"""Counts what a loader's connections to each node came to: which node is left alone for a while, and when an epoch ends
because none delivers. Pure: no I/O, no clock.

Data path: none; where a connection is made anew.

A node that is at a slow task answers pings, so its connection stands, and that is waited for without an end. A node
that cannot deliver (its process is ended again and again, large packets are lost on the way to it, something between
cuts connections) shows in connections that end although they had tasks, and answered none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from asyncloader.workers.ipc.peer_text import line_of

_FIRST_REST_S, _LONGEST_REST_S = 0.05, 3.0
_FORGOTTEN_S = 60.0  # after which a node is as good as any
_FEWEST = 3  # connections that came to nothing, before that means anything
_MOST_TEXT = 300
_MOST_UNREADABLE = 3  # connections in a row that ended with an answer that cannot be read, before a node is left alone


@dataclass
class _NodeRecord:
    connected: int = 0
    batches: int = 0  # of connections that have ended
    fruitless: int = 0  # connections that ended without an answer to their tasks
    unreadable: int = 0  # connections in a row that ended with an answer that cannot be read
    why: str = ""  # the last one ended, or could not be made
    in_a_row: int = 0
    failed_at: float = -inf
    refused_at: float = -inf  # no worker connection could be opened then, and none was since


class NodeProgress:
    """One loader's connections. Times are seconds on any one clock.

    Args:
        wait: seconds without an answer from any node, while connections come to nothing, after which that is an error.
    """

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._nodes: dict[str, _NodeRecord] = {}
        self._fruitless = 0  # connections without an answer from any node in between
        self._first = self._last = 0.0  # when the first and the last of them ended
        self._answers = 0  # of all nodes, by then

    def _node(self, address: str) -> _NodeRecord:
        return self._nodes.setdefault(address, _NodeRecord())

    def connected(self, address: str) -> None:
        """A worker connection was opened."""
        node = self._node(address)
        node.connected += 1
        node.refused_at = -inf

    def refused(self, address: str, why: str, now: float) -> None:
        """No worker connection could be opened."""
        node = self._node(address)
        node.why, node.refused_at = why, now

    def lost(
        self,
        address: str,
        why: str,
        opened: float,
        tasks: int,
        answers: int,
        every: int,
        now: float,
        *,
        unreadable: bool = False,
    ) -> None:
        """A worker connection has ended, and its worker may be well.

        Args:
            address: of its node.
            why: it has ended.
            opened: when it was opened.
            tasks: that it was sent.
            answers: that came from it.
            every: answers of all worker connections so far.
            now: the time.
            unreadable: whether it ended with an answer that cannot be read.
        """
        node = self._node(address)
        node.why = why
        node.batches += answers
        node.unreadable = unreadable + (0 if answers else node.unreadable)
        if answers:
            node.in_a_row = 0
            return
        if opened >= node.failed_at:  # several worker connections that break at a time are one failure
            node.in_a_row += 1
            node.failed_at = now
        if not tasks:
            return
        node.fruitless += 1
        if every != self._answers or now - self._last > self._wait:
            self._fruitless, self._first, self._answers = 0, now, every
        self._fruitless += 1
        self._last = now

    def unreadable(self, address: str) -> str | None:
        """Why this node is used no more; None: it may be."""
        node = self._nodes.get(address)
        if node is None or node.unreadable < _MOST_UNREADABLE:
            return None
        why = line_of(node.why, _MOST_TEXT)
        return f"{node.unreadable} times in a row its answers could not be read; the last time: {why}"

    def failures(self, address: str, now: float) -> int:
        """How often the node has delivered nothing since it last did."""
        node = self._nodes.get(address)
        return node.in_a_row if node is not None and now - node.failed_at < _FORGOTTEN_S else 0

    def avoided(self, address: str, now: float) -> bool:
        """Whether a worker that delivers elsewhere should not leave for this node."""
        node = self._nodes.get(address)
        return node is not None and (self.failures(address, now) > 0 or now - node.refused_at < _FORGOTTEN_S)

    def rest(self, address: str, now: float) -> float:
        """Seconds for which the node should be left alone yet."""
        failures = self.failures(address, now)
        if not failures:
            return 0.0
        rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(failures - 1, 30))
        return max(0.0, self._nodes[address].failed_at + rest - now)

    def problem(self, every: int, stands: bool, now: float) -> str | None:
        """The error's text if the epoch should end, because no node delivers; else None.

        Args:
            every: answers of all worker connections so far.
            stands: whether a worker connection with tasks stands, and its node answers pings: it may just be slow.
            now: the time.
        """
        if stands or every != self._answers or self._fruitless < _FEWEST or now - self._first < self._wait:
            return None
        told = "; ".join(f"{address}: {self._told(node)}" for address, node in sorted(self._nodes.items()))
        return (
            f"no batch came from any node for {now - self._first:.0f} seconds, and {self._fruitless} connections that "
            f"had tasks ended meanwhile: {told}. Look at the nodes' logs, and at what lies between them and this "
            "machine; wait= of Service says how long to go on"
        )

    @staticmethod
    def _told(node: _NodeRecord) -> str:
        why = line_of(node.why, _MOST_TEXT)
        if not node.connected:
            return f"not connected ({why})"
        times = "once" if node.connected == 1 else f"{node.connected} times"
        return f"connected {times}, {node.batches} batches, {node.fruitless} times nothing before the end (last: {why})"
