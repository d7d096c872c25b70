"""A node's log on standard error: a peer can neither forge a line of it nor fill the disk with it.

Data path: none.

Whatever module logs: control characters are escaped, lines are cut, and their number in a minute is bounded. A record
may name the peer that caused it (``extra={"peer": ...}``), which then has a bound of its own, besides that of all peers
together; records of no peer have theirs, so that no peer can crowd them out. What is left out is counted, and the next
line says how many that were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from asyncloader.workers.ipc.peer_text import LINES_PER_MINUTE, LineLimit, block_of, line_of

ALL_PER_MINUTE: Final = 300
"""Lines of all peers together in a minute, at most; and of what no peer caused."""
BLOCK: Final = 4000
"""Characters of a traceback, at most."""
_BLOCK_LINES = 60
_MOST_PEERS = 1024


class NodeLog(logging.StreamHandler):  # type: ignore[type-arg] # it takes parameters in type stubs only
    """The handler.

    Args:
        clock: gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._lines = logging.Formatter()
        self._clock = clock
        self._all_peers, self._own = LineLimit(ALL_PER_MINUTE), LineLimit(ALL_PER_MINUTE)
        self._peers: dict[str, LineLimit] = {}
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless there were too many."""
        if self._admits(getattr(record, "peer", None)):
            super().emit(record)
        else:
            self._left_out += 1

    def _admits(self, peer: str | None) -> bool:
        now = self._clock()
        if peer is None:
            return self._own.admits(now)
        limit = self._peers.pop(peer, None) or LineLimit(LINES_PER_MINUTE)
        while len(self._peers) >= _MOST_PEERS:
            del self._peers[next(iter(self._peers))]  # the one that is silent for longest
        self._peers[peer] = limit
        return limit.admits(now) and self._all_peers.admits(now)

    def format(self, record: logging.LogRecord) -> str:
        """One line. A traceback, and further lines of what no peer caused, follow with a bar, as no record begins."""
        first, rest = record.getMessage(), ""
        if getattr(record, "peer", None) is None:
            first, _, rest = first.partition("\n")
        if record.exc_info and record.exc_info[0] is not None:
            rest += "\n" + self._lines.formatException(record.exc_info)
        left_out, self._left_out = self._left_out, 0
        note = f" ({left_out:,} lines before this one were left out)" if left_out else ""
        block = block_of(rest.strip("\n"), BLOCK).split("\n")[-_BLOCK_LINES:] if rest else []
        head = f"{self._lines.formatTime(record)} {record.levelname} {line_of(first)}{note}"
        return "\n  | ".join([head, *block])


def set_up_log(level: int) -> None:
    """Have this program, which is a node, log to standard error from this level on."""
    logging.basicConfig(level=level, handlers=[NodeLog()])
