"""The node's end of a logical worker whose loader shares its epochs with others: each batch is made once for all.

Data path: worker_host -> [shared_epoch_connection] -> epoch_cache -> [shared_epoch_connection] -> connection -> loader.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Hashable
from functools import partial
from time import perf_counter

from asyncloader.service.node.epoch_cache import EpochCache, MadeBatch, Waiter
from asyncloader.service.node.memory_quota import MemoryQuota
from asyncloader.service.node.worker_connections import RelayedConnection
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.handshake import Opening
from asyncloader.service.protocol.msgpack_codec import epoch_of
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.workers.ipc import wire


class SharedEpochConnection(RelayedConnection):
    """A `RelayedConnection` that asks the cache first.

    Args:
        link, sock, quota, ended, kill: as of `RelayedConnection`.
        opening: what the loader asked for.
        cache: the node's.
        dataset: says which dataset it is.
    """

    def __init__(
        self,
        link: Link,
        sock: socket.socket,
        opening: Opening,
        quota: MemoryQuota,
        ended: Callable[[], None],
        kill: Callable[[], None],
        cache: EpochCache,
        dataset: Hashable,
    ) -> None:
        super().__init__(link, sock, opening.credits, quota, ended, kill)
        self._cache = cache
        self._recipe = dataset, _recipe(opening)
        setup = opening.setup
        self._epochs = {setup.attachment: epoch_of(opening.start)}  # by the loader's counter
        self._making: dict[tuple[int, int], Hashable] = {}  # tasks that this connection's process carries out
        self._awaited: dict[tuple[int, int], tuple[Hashable, Waiter]] = {}  # tasks that another's does
        self._template = b""  # of the process's last batch
        self._bad = b""  # of the task that it answers next
        self._cache.join()

    # ------------------------------------------------------------------------------------------ from the loader

    def _pass_to_process(self, kind: int, body: bytes) -> None:
        if kind == wire.RESET:
            counter, payload = wire.unpack_reset(body)
            self._epochs[counter] = epoch_of(payload)
        super()._pass_to_process(kind, body)

    def _give(self, epoch: int, task: int, index: bytes) -> None:
        if epoch not in self._epochs:
            raise ValueError(f"broken stream: a task of epoch {epoch}, which was not begun")
        key = self._recipe, self._epochs[epoch], hashlib.blake2b(index, digest_size=32).digest()
        waiter = partial(self._made_elsewhere, epoch, task, index, key)
        found = self._cache.ask(key, waiter)
        if isinstance(found, MadeBatch):
            self._deliver(epoch, task, found)
        elif found == "make":
            self._make(epoch, task, index, key)
        else:
            self._awaited[epoch, task] = key, waiter

    def _make(self, epoch: int, task: int, index: bytes, key: Hashable) -> None:
        self._making[epoch, task] = key
        super()._give(epoch, task, index)

    def _made_elsewhere(self, epoch: int, task: int, index: bytes, key: Hashable, made: MadeBatch | None) -> bool:
        """A batch that was waited for is there, or is ours to make. Called from another connection: raises nothing."""
        self._awaited.pop((epoch, task), None)
        if (epoch, task) not in self._unanswered or self._channel.fileno() < 0:
            return False
        try:
            if made is None:
                self._make(epoch, task, index, key)
            else:
                self._deliver(epoch, task, made)
        except Exception as error:
            self._fails(error)  # which lets go of what this connection makes, too
        return True

    # ------------------------------------------------------------------------------------------ to the loader

    def _deliver(self, epoch: int, task: int, made: MadeBatch) -> None:
        """Send a batch that another connection's process has made; the loader's worker spent no time on it."""
        self._send_made(made._replace(result=made.result._replace(epoch=epoch, seq=task, busy=0.0)))
        self._answered(epoch, task)

    def _send_made(self, made: MadeBatch) -> None:
        """Send a batch with its template: which one the loader had before depends on who made that."""
        result = made.result._replace(sent=perf_counter())
        self._send_bad(result.epoch, result.seq, made.bad)
        body = wire.pack_result(result, made.template)[wire.PREFIX_BYTES :]
        payload = memoryview(made.payload) if made.payload else None
        sent = None if payload is None else self._own(payload)  # the cache may have dropped it before it is sent
        self._send(wire.RESULT, body, result.epoch, result.seq, payload, sent)

    def _send_bad(self, epoch: int, task: int, bad: bytes) -> None:
        if bad:
            body = wire.pack_answer(wire.BAD_SAMPLES, epoch, task, 0.0, bad)[wire.PREFIX_BYTES :]
            self._send(wire.BAD_SAMPLES, body)

    def _pass_on(self, kind: int, body: bytes) -> None:
        if kind == wire.BAD_SAMPLES:  # kept for the answer: a batch of another connection must not come between them
            self._bad = wire.unpack_answer(body)[3]
            return
        if kind in (wire.ERROR, wire.ALL_DROPPED):
            epoch, task, _, _ = wire.unpack_answer(body)
            self._send_bad(epoch, task, self._bad)
            self._bad = b""
        super()._pass_on(kind, body)
        if kind == wire.RESET_DONE:
            epoch = wire.unpack_reset(body)[0]
            self._epochs = {counter: number for counter, number in self._epochs.items() if counter >= epoch}
            for key in [key for key in self._making if key[0] < epoch]:
                self._cache.failed(self._making.pop(key))

    def _void(self, epoch: int) -> None:
        super()._void(epoch)
        for key in [key for key in self._awaited if key[0] < epoch]:
            self._cache.leave(*self._awaited.pop(key))

    def _batch(
        self,
        body: bytes,
        result: wire.Result,
        template: bytes,
        payload: memoryview | None,
        sent: Callable[[], None] | None,
    ) -> None:
        if not result.same:
            self._template = template
        del body
        bad, self._bad = self._bad, b""
        made = MadeBatch(result._replace(same=False, cursor=0), self._template, bytes(payload or b""), bad)
        if sent is not None:
            sent()
        self._send_made(made)
        key = self._making.pop((result.epoch, result.seq), None)
        if key is not None:
            self._cache.made(key, made)

    def _answered(self, epoch: int, task: int) -> None:
        super()._answered(epoch, task)
        key = self._making.pop((epoch, task), None)
        if key is not None:  # with an error, or without a batch
            self._cache.failed(key)

    def _leave_process(self) -> None:
        super()._leave_process()
        while self._awaited:
            self._cache.leave(*self._awaited.popitem()[1])
        while self._making:
            self._cache.failed(self._making.popitem()[1])

    def close(self) -> None:
        """As `RelayedConnection.close`."""
        open_until_now = self._link.fileno() >= 0
        super().close()
        if open_until_now:
            self._cache.part()


def _recipe(opening: Opening) -> bytes:
    """What decides on a batch's content, besides dataset, epoch and index."""
    setup, seeded = opening.setup, opening.setup.seeded
    assert seeded is not None  # a service serves seeded loaders only
    policy = None if setup.policy is None else tuple(setup.policy)
    return pack((setup.auto_collation, seeded.seed, seeded.replicas, seeded.seed_collate, policy))
