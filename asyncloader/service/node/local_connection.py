"""The node's end of a worker connection of a loader on this machine, which has the process's socket itself.

Data path: beside it; loader and process share the loader's ring, and the node only reports how the process ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.records import DeathReport, pack_record


class LocalConnection:
    """The connection of a loader on this machine, which has the process's socket itself.

    Args:
        link: to the loader. After OPENED only KILL and DIED are sent on it.
        ended: called once the connection is closed.
        kill: called when a task takes too long for the loader.
    """

    relayed = False
    batches = sent_bytes = in_work = waiting = 0  # see `CountedConnection`

    def __init__(self, link: Link, ended: Callable[[], None], kill: Callable[[], None]) -> None:
        self._link = link
        self._ended = ended
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            for message in self._link.receive():
                if message.header.kind == frames.KILL:
                    # Closes this link if the process is at another connection's task: see `HostProcesses.kill`.
                    self._kill()
        except ValueError:  # a broken stream
            self._link.ended = True
        if self._link.ended:
            self.close()

    def died(self, death: DeathReport) -> None:
        """Report to the loader that the process died."""
        # Not kept if the socket is full: a report is small, and nothing else was sent on this link.
        with contextlib.suppress(ConnectionError):
            self._link.send(frames.DIED, pack_record(death))
        self.close()

    def close(self) -> None:
        """Close the link. Idempotent."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._link.close()
            self._ended()

    async def drain(self) -> None:
        """Close the link: batches that the process has made are in the loader's own ring already."""
        self.close()
