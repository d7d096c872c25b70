"""Joins the clocks of two machines by the times of messages between them. Pure.

A message is received after it was sent. So each task that reaches a node, and each answer that comes back, bounds the
difference of the clocks from one side; the messages that were fastest bound it best. With the joined clocks no message
is received before it was sent.
"""

from __future__ import annotations

from math import inf


class ClockOffset:
    """How much a node's clock is ahead of this machine's."""

    __slots__ = ("_least", "_most")

    def __init__(self) -> None:
        self._least, self._most = -inf, inf

    def there(self, sent_here: float, received_there: float) -> None:
        """Note a message to the node, by the clocks of sender and receiver."""
        self._most = min(self._most, received_there - sent_here)

    def back(self, sent_there: float, received_here: float) -> None:
        """Note a message from the node."""
        self._least = max(self._least, sent_there - received_here)

    @property
    def seconds(self) -> float:
        """Seconds to subtract from the node's times: 0 if both may have one clock, else the middle of the bounds."""
        if self._least <= 0.0 <= self._most:
            return 0.0
        if self._most == inf or self._least == -inf:
            return self._least if self._most == inf else self._most
        return (self._least + self._most) / 2

    @property
    def error(self) -> float:
        """By how many seconds it may be wrong, at most."""
        return max(0.0, (self._most - self._least) / 2)
