"""Requests assignments of shard ranges from the main process, on behalf of a worker stream.

Data path: worker_stream -> [assignment_client] -> channel -> ShardAssigner in the main process.

A request carries the number of the assignment that it asks for. The reply to a given number is always the same, no
matter how often it is requested. So a worker that died with an unanswered request leaves nothing to remember.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from asyncloader.base.shielding import shielded
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc import wire


class AssignmentReply(NamedTuple):
    """The reply to a request.

    Attributes:
        assignment: ranges (plain tuples) to read next; None: no ranges are left.
        over: the worker's stream ends.
        last: the unfinished batch is the last batch of the epoch.
    """

    assignment: Sequence[Sequence[Any]] | None
    over: bool = False
    last: bool = False


class AssignmentSource(Protocol):
    """Provides one worker stream with assignments."""

    key: int
    """Seed of the worker's shuffle buffer."""

    def prepare(self, number: int, batch: int) -> None:
        """Request assignment `number` now, so that it has come when it is needed."""

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> AssignmentReply:
        """Return assignment `number`; see `ShardAssigner.ask`."""
        ...


class AssignmentProvider(Protocol):
    """Provides a reader with the `AssignmentSource` of each epoch."""

    async def prepare(self) -> None:
        """Prepare a call of `source`. Await it before."""

    def source(self, start: EpochStart, /) -> AssignmentSource:
        """Return the source of the epoch that begins."""
        ...


class ChannelAssignments:
    """`AssignmentSource` of a worker process: sends requests over its channel.

    Args:
        key: the seed of the shuffle buffer.
        send: sends a frame.
        values: how they travel: a `MessageCodec`.
        epoch: the pool's number for the epoch.
    """

    def __init__(self, key: int, send: Callable[[bytes], None], values: Any, epoch: int) -> None:
        self.key = key
        self._send = send
        self._values = values
        self._epoch = epoch
        self._waiting: dict[int, asyncio.Future[AssignmentReply]] = {}  # there is one request at a time

    def prepare(self, number: int, batch: int) -> None:
        """Send the request. See `AssignmentSource.prepare`."""
        self._request(number, batch, None)

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> AssignmentReply:
        """Send the request, and wait for the reply. See `AssignmentSource.ask`."""
        # Shielded: if this is cancelled, the next call for this number waits for the reply to the same request.
        answer = await shielded(self._request(number, batch, left))
        # Only after the reply: if the wait is cancelled, the entry stays for the next call.
        self._waiting.pop(number, None)
        return answer

    def _request(
        self, number: int, batch: int, left: Sequence[Sequence[Any]] | None
    ) -> asyncio.Future[AssignmentReply]:
        waiting = self._waiting.get(number)
        if waiting is None:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            plain = None if left is None else [tuple(shard_range) for shard_range in left]
            self._send(wire.pack_ask(self._epoch, number, batch, self._values.dumps(plain)))
        return waiting

    def answered(self, body: bytes) -> None:
        """Handle a reply frame."""
        epoch, number, payload = wire.unpack_assignment(body)
        waiting = self._waiting.get(number)
        # The reply may be to a request of the epoch before, which had the same number.
        if epoch == self._epoch and waiting is not None and not waiting.done():
            waiting.set_result(AssignmentReply(*self._values.loads(payload)))

    def close(self) -> None:
        """Cancel all pending requests."""
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting.clear()


class WorkerAssignments:
    """`AssignmentProvider` of a worker process, for all its epochs.

    Args:
        send: sends a frame.
        values: how they travel: a `MessageCodec`.
    """

    def __init__(self, send: Callable[[bytes], None], values: Any) -> None:
        self._send = send
        self._values = values
        self._newest: ChannelAssignments | None = None
        self.epoch = 0
        """The pool's number for the current epoch."""

    async def prepare(self) -> None:
        """Do nothing: the main process has prepared everything. As `AssignmentProvider.prepare`."""

    def source(self, start: EpochStart) -> ChannelAssignments:
        """Return a new source and close the previous one. As `AssignmentProvider.source`."""
        if self._newest is not None:
            # Tasks of the epoch before must not wait for replies that will not be taken any more.
            self._newest.close()
        self._newest = ChannelAssignments(start.stream_key, self._send, self._values, self.epoch)
        return self._newest

    def answered(self, body: bytes) -> None:
        """Handle a reply frame."""
        if self._newest is not None:
            self._newest.answered(body)
