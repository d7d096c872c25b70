"""Chooses the nodes of a loader's workers, and counts the results of its connections to each node. They decide which
node is left alone for a while, and when an epoch ends because no node delivers. Pure: no I/O, no clock.

A node with a slow task answers pings, so its connection stands, and the loader waits for it without limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from asyncloader.base.peer_text import line_of

_FIRST_REST_S, _LONGEST_REST_S = 0.05, 3.0
_FORGOTTEN_S = 60.0  # after which failures do not count any more
_FEWEST = 3  # fruitless connections, before an epoch may end for them
_MOST_TEXT = 300


@dataclass
class _NodeRecord:
    connected: int = 0
    batches: int = 0  # of connections that have ended
    fruitless: int = 0  # connections with tasks that ended without any answer
    why: str = ""  # the last connection ended, or could not be made
    in_a_row: int = 0  # failures since the last batch
    failed_at: float = -inf


class NodeHealth:
    """One loader's connections. Times are seconds on one clock of the caller's choice.

    Args:
        wait: seconds after which it is an error that connections end without answers, and no node answers.
    """

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._nodes: dict[str, _NodeRecord] = {}
        self._fruitless = 0  # fruitless connections since the last answer of any node
        self._first = self._last = 0.0  # when the first and the last of them ended
        self._answers = 0  # answers of all nodes when the first of them ended

    def _node(self, address: str) -> _NodeRecord:
        return self._nodes.setdefault(address, _NodeRecord())

    def connected(self, address: str) -> None:
        """Note that a worker connection was opened."""
        self._node(address).connected += 1

    def refused(self, address: str, why: str) -> None:
        """Note that no worker connection could be opened."""
        self._node(address).why = why

    def lost(
        self,
        address: str,
        why: str,
        opened: float,
        tasks: int,
        answers: int,
        every: int,
        now: float,
    ) -> None:
        """Note that a worker connection has ended, although its worker may be running.

        Args:
            address: its node.
            why: why it has ended.
            opened: when it was opened.
            tasks: tasks sent over it.
            answers: answers received over it.
            every: answers of all worker connections so far.
            now: the time.
        """
        node = self._node(address)
        node.why = why
        node.batches += answers
        if answers:
            node.in_a_row = 0
            return
        # A node that dies ends all its connections; those opened before the last failure belong to that failure. Each
        # of them counted would let a node with many workers rest the longest after its first failure.
        if opened >= node.failed_at:
            node.in_a_row += 1
            node.failed_at = now
        # A node that cannot deliver shows in connections that had tasks, and ended without an answer: its process is
        # killed again and again, large packets are lost, or a firewall cuts connections.
        if not tasks:
            return
        node.fruitless += 1
        # A new series begins with any answer of any node, and after a pause in which no connection failed.
        if every != self._answers or now - self._last > self._wait:
            self._fruitless, self._first, self._answers = 0, now, every
        self._fruitless += 1
        self._last = now

    def failures(self, address: str, now: float) -> int:
        """Return the number of failures of the node since its last batch."""
        node = self._nodes.get(address)
        return node.in_a_row if node is not None and now - node.failed_at < _FORGOTTEN_S else 0

    def rest(self, address: str, now: float) -> float:
        """Return the seconds for which the node should still be left alone."""
        failures = self.failures(address, now)
        if not failures:
            return 0.0
        # The exponent has a limit, because a power of more than 1,023 raises OverflowError.
        rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(failures - 1, 30))
        return max(0.0, self._nodes[address].failed_at + rest - now)

    def problem(self, every: int, stands: bool, now: float) -> str | None:
        """Return the error's text if the epoch should end because no node delivers; else None.

        Args:
            every: answers of all worker connections so far.
            stands: whether a connection with tasks stands, and its node answers pings: the node may just be slow.
            now: the time.
        """
        # Any answer since the series began, and any node that may just be slow, are reasons to go on.
        if stands or every != self._answers or self._fruitless < _FEWEST or now - self._first < self._wait:
            return None
        nodes = "; ".join(f"{address}: {self._describe(node)}" for address, node in sorted(self._nodes.items()))
        return (
            f"no batch came from any node for {now - self._first:.0f} seconds, and {self._fruitless} connections that "
            f"had tasks ended meanwhile: {nodes}. Look at the nodes' logs, and at what lies between them and this "
            "machine; wait= of Service says how long to go on"
        )

    @staticmethod
    def _describe(node: _NodeRecord) -> str:
        why = line_of(node.why, _MOST_TEXT)
        if not node.connected:
            return f"not connected ({why})"
        times = "once" if node.connected == 1 else f"{node.connected} times"
        return f"connected {times}, {node.batches} batches, {node.fruitless} times nothing before the end (last: {why})"


def node_order(loads: Sequence[float], turn: int, failures: Sequence[int] | None = None) -> list[int]:
    """Return the numbers of nodes in the order in which a worker tries them: by failures, by load, and in turn."""
    failed = failures or [0] * len(loads)
    return sorted(range(len(loads)), key=lambda number: (failed[number], loads[number], (number - turn) % len(loads)))
