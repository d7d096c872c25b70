"""How a lane asks the main process for what it reads next. Data path: dataset -> [leasing] -> channel -> lease book.

A request says which of the lane's leases it is for: the answer to it is always the same, whoever asks, and however
often. So nothing needs to be remembered of one that was not answered when its worker died.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc import wire

__all__ = ["ChannelLeases", "LeaseAnswer", "LeaseSource", "Leasing", "WorkerLeasing", "is_leased"]


def is_leased(dataset: Any) -> bool:
    """Whether the main process leases parts of the dataset to the workers."""
    return callable(getattr(dataset, "open_lane", None))


class LeaseAnswer(NamedTuple):
    """What the lane may do.

    Attributes:
        lease: pieces (plain tuples) to be read next; None: there are none.
        over: the lane's stream ends.
        last: what it has left is the last batch.
    """

    lease: Sequence[Sequence[Any]] | None
    over: bool = False
    last: bool = False


class LeaseSource(Protocol):
    """Gives one lane its leases."""

    key: int
    """Chooses the orders of the lane's shuffle buffer."""

    def prepare(self, number: int, batch: int) -> None:
        """Ask for lease `number` now, that it may be there when it is needed."""
        ...

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> LeaseAnswer:
        """Lease `number`; see `LeaseBook.ask`."""
        ...


class Leasing(Protocol):
    """Where a reader gets its `LeaseSource` of an epoch from."""

    async def prepare(self) -> None:
        """What must be awaited before."""
        ...

    def source(self, start: EpochStart, /) -> LeaseSource:
        """That of the epoch that begins."""
        ...


class ChannelLeases:
    """`LeaseSource` of a worker process: asks over its channel.

    Args:
        key: of the lane.
        send: sends a frame.
        epoch: the pool's number for the epoch.
    """

    def __init__(self, key: int, send: Callable[[bytes], None], epoch: int) -> None:
        self.key = key
        self._send = send
        self._epoch = epoch
        self._waiting: dict[int, asyncio.Future[LeaseAnswer]] = {}  # there is one request at a time

    def prepare(self, number: int, batch: int) -> None:
        """As `LeaseSource.prepare`."""
        self._request(number, batch, None)

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> LeaseAnswer:
        """As `LeaseSource.ask`."""
        answer = await asyncio.shield(self._request(number, batch, left))
        self._waiting.pop(number, None)
        return answer

    def _request(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> asyncio.Future[LeaseAnswer]:
        waiting = self._waiting.get(number)
        if waiting is None:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            plain = None if left is None else [tuple(piece) for piece in left]
            self._send(wire.pack_ask(self._epoch, number, batch, pickle.dumps(plain, 5)))
        return waiting

    def answered(self, body: bytes) -> None:
        """A frame came."""
        epoch, number, payload = wire.unpack_lease(body)
        waiting = self._waiting.get(number)
        if epoch == self._epoch and waiting is not None and not waiting.done():
            waiting.set_result(LeaseAnswer(*pickle.loads(payload)))

    def close(self) -> None:
        """Nobody waits any more."""
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting.clear()


class WorkerLeasing:
    """`Leasing` of a worker process, for all its epochs.

    Args:
        send: sends a frame.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._newest: ChannelLeases | None = None
        self.epoch = 0
        """The pool's number for the present epoch."""

    async def prepare(self) -> None:
        """As `Leasing.prepare`: the main process has prepared everything."""

    def source(self, start: EpochStart) -> ChannelLeases:
        """As `Leasing.source`."""
        if self._newest is not None:
            self._newest.close()
        self._newest = ChannelLeases(start.stream_key, self._send, self.epoch)
        return self._newest

    def answered(self, body: bytes) -> None:
        """A frame came."""
        if self._newest is not None:
            self._newest.answered(body)
