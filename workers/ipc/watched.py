"""Has an event loop watch a worker that is reached by descriptors: a process of this machine, or a connection.

Data path: worker -> channel -> [watched] -> pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Watched:
    """The part of a `WorkerHandle` that registers its descriptors."""

    channel: Any

    @property
    def death_fd(self) -> int:
        """File descriptor that is readable once the worker has ended, or its connection."""
        raise NotImplementedError

    def listen(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None], died: Callable[[], None]) -> None:
        """Have the loop watch the channel and the descriptor of its end. See `WorkerHandle.listen`."""
        loop.add_reader(self.channel.fileno(), readable)
        loop.add_reader(self.death_fd, died)

    def unlisten(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `listen`. See `WorkerHandle.unlisten`."""
        if self.channel.fileno() >= 0:  # otherwise it has been released
            loop.remove_reader(self.channel.fileno())
            loop.remove_writer(self.channel.fileno())
            loop.remove_reader(self.death_fd)
