"""The node's end of a worker connection whose loader shares its epochs with others: each batch is made once for all.

Data path: worker_host -> [shared_epoch_connection] -> epoch_cache -> [shared_epoch_connection] -> link -> loader.
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
    """A `RelayedConnection` that asks the cache for each batch, and gives only missing batches to its process.

    Args:
        link, sock, quota, ended, kill: those of `RelayedConnection`.
        opening: the loader's request.
        cache: the node's.
        dataset: identifies the dataset.
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
        # Before `super()`, which registers both sockets' readers: a start that cannot be read raises here, and the
        # caller closes both sockets. The next sockets get their numbers, and the loop would never call their readers.
        self._recipe = dataset, _recipe(opening)
        setup = opening.setup
        # Tasks name the loader's own count of epochs, which differs between loaders. Batches are shared by the number
        # of the epoch, which the start of each has.
        self._epochs = {setup.attachment: epoch_of(opening.start)}  # by the loader's counter
        super().__init__(link, sock, opening.credits, quota, ended, kill)
        self._cache = cache
        self._making: dict[tuple[int, int], Hashable] = {}  # tasks that this connection's process has
        self._awaited: dict[tuple[int, int], tuple[Hashable, Waiter]] = {}  # tasks that other processes have
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
        # A digest: the cache bounds the number of its entries, so their size must not be the loader's choice.
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
        """Send a batch that was waited for, or make it, if it is None. Returns whether the task still wants it."""
        self._awaited.pop((epoch, task), None)
        # The task may have been abandoned since: the loader has begun another epoch, or this process has died.
        if (epoch, task) not in self._unanswered or self._channel.fileno() < 0:
            return False
        try:
            if made is None:
                self._make(epoch, task, index, key)
            else:
                self._deliver(epoch, task, made)
        except Exception as error:
            # Not raised: the caller is another connection, which is not at fault. `_fail` closes this connection, which
            # passes the batch on to the next in line: so True is right here, too.
            self._fail(error)
        return True

    # ------------------------------------------------------------------------------------------ to the loader

    def _deliver(self, epoch: int, task: int, made: MadeBatch) -> None:
        """Send a batch that another connection's process has made."""
        # `busy` is 0: this loader's worker spent no time on it.
        self._send_made(made._replace(result=made.result._replace(epoch=epoch, seq=task, busy=0.0)))
        self._answered(epoch, task)

    def _send_made(self, made: MadeBatch) -> None:
        """Send a batch with its template."""
        # Never "same as before": the loader's previous batch may come from another process, with another template.
        result = made.result._replace(sent=perf_counter())
        # First: a loader takes the records for those of the next answer that it receives.
        self._send_bad(result.epoch, result.seq, made.bad)
        body = wire.pack_result(result, made.template)[wire.PREFIX_BYTES :]
        payload = memoryview(made.payload) if made.payload else None
        # Counted in the loader's quota, not only in the cache: the cache may drop the batch before it is sent, and then
        # only this message holds it.
        sent = None if payload is None else self._own(payload)
        self._send(wire.RESULT, body, result.epoch, result.seq, payload, sent)

    def _send_bad(self, epoch: int, task: int, bad: bytes) -> None:
        if bad:
            body = wire.pack_answer(wire.BAD_SAMPLES, epoch, task, 0.0, bad)[wire.PREFIX_BYTES :]
            self._send(wire.BAD_SAMPLES, body)

    def _pass_on(self, kind: int, body: bytes) -> None:
        if kind == wire.BAD_SAMPLES:
            # Kept for the answer: a loader takes the records for those of the next answer, and a batch that another
            # process has made could be sent in between.
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
            # The process has dropped these tasks, but loaders that are still in that epoch may wait for their batches.
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
            sent()  # the payload was copied: the slot is free before the batch is sent
        self._send_made(made)
        # Taken out before `_answered` is called, which reports a task that it finds here as failed.
        key = self._making.pop((result.epoch, result.seq), None)
        if key is not None:
            self._cache.made(key, made)

    def _answered(self, epoch: int, task: int) -> None:
        super()._answered(epoch, task)
        key = self._making.pop((epoch, task), None)
        if key is not None:  # the answer is an error, or that all samples were dropped: another process may do better
            self._cache.failed(key)

    def _leave_process(self) -> None:
        super()._leave_process()
        # First this connection leaves all lines: `failed` asks the next in line to make the batch, which must not be
        # this connection again.
        while self._awaited:
            self._cache.leave(*self._awaited.popitem()[1])
        while self._making:
            self._cache.failed(self._making.popitem()[1])

    def close(self) -> None:
        """Close link and channel. Idempotent."""
        was_open = self._link.fileno() >= 0  # the cache counts its users: leave it once
        super().close()
        if was_open:
            self._cache.part()


def _recipe(opening: Opening) -> bytes:
    """Pack the options that decide on a batch's content, besides dataset, epoch and index."""
    setup, seeded = opening.setup, opening.setup.seeded
    assert seeded is not None  # a service serves seeded loaders only
    policy = None if setup.policy is None else tuple(setup.policy)
    return pack((setup.auto_collation, seeded.seed, seeded.replicas, seeded.seed_collate, policy))
