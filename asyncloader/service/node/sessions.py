"""Describes the loaders that read from a node: their memory, their connections, and the batches sent to them. Pure.

Data path: beside worker_connections.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import NamedTuple, Protocol

from asyncloader.service.node.memory_quota import MemoryQuota

_FREE_FILES = 32  # for handshakes


class CountedConnection(Protocol):
    """The node's end of a worker connection, with its counts."""

    relayed: bool
    """Whether the node sends its batches. Else they do not pass the node, and the counts stay 0."""
    batches: int
    """Batches that were sent."""
    sent_bytes: int
    """Bytes of these."""

    @property
    def in_work(self) -> int:
        """Tasks that the process has."""
        ...

    @property
    def waiting(self) -> int:
        """Tasks that the process does not have yet."""
        ...


class OpenConnection(NamedTuple):
    """A worker connection: the worker's number in its loader, its process, and the node's end."""

    worker: int
    pid: int
    end: CountedConnection


class Session:
    """A loader that reads from the node.

    Args:
        quota: its memory, with the name that it gave itself.
        peer: its address, or "this machine".
        dataset: the definition and its arguments, as text.
    """

    def __init__(self, quota: MemoryQuota, peer: str, dataset: str) -> None:
        self.quota = quota
        self.peer = peer
        self.dataset = dataset
        self.connections: dict[int, OpenConnection] = {}
        """By their numbers, of which none is used twice."""
        self._batches = self._bytes = 0  # of connections that have ended

    def left(self, number: int) -> None:
        """Note that a connection has ended."""
        ended = self.connections.pop(number, None)
        if ended is not None:
            self._batches += ended.end.batches
            self._bytes += ended.end.sent_bytes

    @property
    def batches(self) -> int:
        """Batches that were sent to it."""
        return self._batches + sum(each.end.batches for each in self.connections.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes of these."""
        return self._bytes + sum(each.end.sent_bytes for each in self.connections.values())


def check_files(descriptor: int, connections: int) -> None:
    """Check that this process has files for one more connection. Raises OSError as the system does if it has not.

    Args:
        descriptor: of the connection; descriptors are given from the lowest on.
        connections: those that are open: one file is left for a ring of each, which would end without it.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] - descriptor < _FREE_FILES + connections:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
