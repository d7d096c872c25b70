"""A node's log on standard error: a peer can neither forge a line of it nor fill the disk with it.

Data path: none.

In records of all modules, control characters are escaped, lines are cut, and their number in a minute is bounded. A
record may name the peer that caused it (``extra={"peer": ...}``). Omitted lines are counted, and the next line has
their number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from asyncloader.base.peer_text import LINES_PER_MINUTE, LineLimit, block_of, line_of

ALL_PER_MINUTE: Final = 300
"""Lines of all peers together in a minute, at most; and lines that no peer caused."""
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
        """Write the record, or count it if there were too many."""
        if self._admits(getattr(record, "peer", None)):
            super().emit(record)
        else:
            self._left_out += 1

    def _admits(self, peer: str | None) -> bool:
        now = self._clock()
        # Records of the node itself have a bound of their own, so that peers cannot crowd them out.
        if peer is None:
            return self._own.admits(now)
        # Taken out and put in again, which keeps the dictionary in the order of the last lines: the first peer has been
        # silent for longest, so that its count may be forgotten.
        limit = self._peers.pop(peer, None) or LineLimit(LINES_PER_MINUTE)
        while len(self._peers) >= _MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        self._peers[peer] = limit
        return limit.admits(now) and self._all_peers.admits(now)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line. Its traceback, and further lines of a text of the node's own, follow it."""
        # These begin with a bar, as no record does: they cannot be taken for records.
        first, rest = record.getMessage(), ""
        if getattr(record, "peer", None) is None:  # a peer's text stays one line, with its line ends escaped
            first, _, rest = first.partition("\n")
        if record.exc_info and record.exc_info[0] is not None:
            rest += "\n" + self._lines.formatException(record.exc_info)
        left_out, self._left_out = self._left_out, 0
        note = f" ({left_out:,} lines before this one were left out)" if left_out else ""
        block = block_of(rest.strip("\n"), BLOCK).split("\n")[-_BLOCK_LINES:] if rest else []
        head = f"{self._lines.formatTime(record)} {record.levelname} {line_of(first)}{note}"
        return "\n  | ".join([head, *block])


def set_up_log(level: int) -> None:
    """Log to standard error from this level on, as a node does."""
    logging.basicConfig(level=level, handlers=[NodeLog()])
