"""Leases for a lane in the same process. Data path: lease book -> [local_leases] -> lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncloader.remote.leases import LeaseBook
from asyncloader.workers.leasing import LeaseAnswer

__all__ = ["LocalLeases"]


class LocalLeases:
    """`LeaseSource` of the only lane there is, in the same process.

    Args:
        book: of the epoch.
        key: of the lane.
    """

    def __init__(self, book: LeaseBook, key: int) -> None:
        self._book = book
        self.key = key

    def prepare(self, number: int, batch: int) -> None:
        """As `LeaseSource.prepare`: nothing takes time here."""

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> LeaseAnswer:
        """As `LeaseSource.ask`."""
        (reply,) = self._book.ask(0, number, batch, left)
        return LeaseAnswer(reply.lease, reply.over, reply.last)
