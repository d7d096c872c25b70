"""A service's node: listens for loaders, checks who they are, and connects each to one of its processes.

Data path: loader -> connection -> [server] -> worker connection.

Each connection is one logical worker of one loader. Its handshake is a coroutine with a deadline; after that the
callbacks of its worker connection have it. Nothing that came over a connection is unpickled, and nothing but the
served definitions is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncloader.service.node.admission import Refused, Served, as_text, find_served
from asyncloader.service.node.async_io import message_of, secure, send_whole, speaks_tls, wait_for
from asyncloader.service.node.epoch_cache import EpochCache
from asyncloader.service.node.memory_quota import MemoryQuota
from asyncloader.service.node.shared_epoch_connection import SharedEpochConnection
from asyncloader.service.node.worker_connections import LocalConnection, RelayedConnection
from asyncloader.service.node.worker_host import HostSetup
from asyncloader.service.node.worker_processes import HostProcesses, NotMade, WorkerConnection
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.handshake import (
    Challenge,
    Hello,
    Look,
    Looked,
    Opened,
    Opening,
    Proof,
    Refusal,
    Welcome,
    nonce,
    proof,
    proves,
    read_opening,
)
from asyncloader.service.protocol.records import DatasetInfo, pack_record, read_record
from asyncloader.service.protocol.shard_plan import PlanRequest, messages, read_request
from asyncloader.service.protocol.sockets import bind, check_peer
from asyncloader.workers.ipc.peer_text import line_of
from asyncloader.workers.memory.segment import memory_limit

_log = logging.getLogger("asyncloader")

DRAIN_S = 30.0
"""Seconds that a node which is to end should give what is in work."""
HANDSHAKE_S = 10.0
"""Seconds that a handshake may take, besides the time in which a process makes its dataset."""
_PLAN_S = 60.0
"""Seconds that a loader may take to receive a plan."""
_PAUSE_S = 0.1
"""Seconds without new connections after one could not be accepted."""
_MOST_CONNECTIONS = 4096
_MOST_UNAUTHENTICATED = 128
_MOST_MEMORY = 0.5  # of what is there, for one quota's batches in work
_MOST_CACHED = 0.25  # of it, for batches that several loaders share
_CACHED_BYTES = 1 << 30  # if the system does not say what is there
_MOST_DATASETS = 8
_LOCAL = "this machine"
_REFUSAL = 2000  # characters of the reason that a loader is given, at most


class Node:
    """Serves definitions.

    Args:
        served: what.
        workers: processes for each definition and set of arguments.
        token: what loaders must prove to have; None: nothing.
        tls: the server's side of TLS; None: plain connections.
        problem: why it serves nothing, which every loader is told; "": it does.
    """

    def __init__(
        self,
        served: Sequence[Served],
        workers: int,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        problem: str = "",
    ) -> None:
        self._served = {each.definition.name: each for each in served}
        self._most_hosts = len(self._served) + _MOST_DATASETS
        self._workers = workers
        self._token = token
        self._tls = tls
        self._problem = problem
        self._hosts: dict[tuple[str, str, bool], HostProcesses] = {}
        self._past = {"deaths": 0.0, "tasks": 0.0, "busy_seconds": 0.0}  # totals of datasets that are not read any more
        self._closing: set[asyncio.Task[None]] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}  # have proved nothing yet, the oldest first
        self._connections: set[RelayedConnection | LocalConnection] = set()
        self._sockets: list[socket.socket] = []
        self._paths: list[str] = []
        self._quotas: dict[str, MemoryQuota] = {}
        memory = memory_limit()[0]
        self._most_memory = None if memory is None else int(_MOST_MEMORY * memory)
        self._cache = EpochCache(_CACHED_BYTES if memory is None else int(_MOST_CACHED * memory))
        self._came, self._left = asyncio.Event(), asyncio.Event()
        self.draining = False
        self.refusals = 0

    # ---------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the processes of what is served with fixed arguments, and wait until each dataset is made.

        Raises:
            ValueError: a dataset cannot be made, or not be served.
        """
        for host in [self._host(served, served.arguments) for served in self._served.values() if not served.open]:
            try:
                info = await host.first_dataset_info()
            except NotMade as error:
                raise ValueError(str(error)) from None
            if info.problem:
                raise ValueError(info.problem)

    def problem(self) -> str:
        """Why a definition with fixed arguments cannot be served now, as one line; empty if all can."""
        for (target, _, threads), host in self._hosts.items():
            if host.lasting and not host.running and (host.problem or not threads):
                return host.problem or f"no process of {target} has its dataset yet"
        return ""

    def serve(self, served: Served) -> None:
        """Serve this from now on, too."""
        self._served.setdefault(served.definition.name, served)

    def _host(self, served: Served, arguments: Mapping[str, Any], *, threads: bool = False) -> HostProcesses:
        key = served.target, json.dumps(arguments, sort_keys=True, default=str), threads
        host = self._hosts.get(key)
        if host is not None and host.given_up:
            self._drop(key)
            host = None
        if host is None:
            if served.open and len(self._hosts) >= self._most_hosts:
                self._make_room()
            data = served.definition.data if isinstance(served.definition, PickledDefinition) else None
            fingerprint = served.definition.fingerprint() if data is None else ""
            setup = HostSetup(served.target, dict(arguments), threads, data, fingerprint)
            host = self._hosts[key] = HostProcesses(setup, self._workers, lasting=not served.open)
            host.start()
        return host

    def _make_room(self) -> None:
        """End the processes of a dataset that nobody reads now."""
        opened = {served.target for served in self._served.values() if served.open}
        idle = next((key for key, host in self._hosts.items() if key[0] in opened and host.idle), None)
        if idle is None or len(self._closing) >= _MOST_DATASETS:
            raise Refused(f"{len(self._hosts)} datasets are read here, and it makes no more now", for_now=True)
        self._drop(idle)

    def _drop(self, key: tuple[str, str, bool]) -> None:
        host = self._hosts.pop(key)
        self._past = {name: past + _totals(host)[name] for name, past in self._past.items()}
        task = asyncio.get_running_loop().create_task(host.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def listen(self, address: str) -> str:
        """Listen at ``tcp://host:port`` or ``unix:/path``. Returns the address, with the port if that was 0.

        Raises:
            OSError: it cannot.
        """
        sock, name = await bind(address)
        sock.listen(1024)
        if sock.family == socket.AF_UNIX:
            self._paths.append(address.removeprefix("unix:"))
        self.listen_at(sock)
        return name

    def listen_at(self, sock: socket.socket) -> None:
        """Take connections from a socket that listens."""
        sock.setblocking(False)
        self._sockets.append(sock)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    async def left(self, seconds: float) -> None:
        """Wait until nobody is connected any more; for the first, that many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._came.wait()
        if self._came.is_set():
            await self._left.wait()

    def _handshake_done(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before it began
            sock.close()
        self._unauthenticated.pop(task, None)
        self._ended(task)

    def _ended(self, which: asyncio.Task[None] | RelayedConnection | LocalConnection) -> None:
        """A connection has ended."""
        self._handshakes.discard(which)
        self._connections.discard(which)
        if not self._handshakes and not self._connections:
            self._left.set()

    def _accept(self, listener: socket.socket) -> None:
        # Not `loop.sock_accept`: cancelled at the wrong moment, it loses the connection that it has accepted.
        loop = asyncio.get_running_loop()
        try:
            sock, where = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # it is gone already
            return
        except OSError as error:  # no descriptors are left: those that are connected go on
            _log.warning("a connection could not be accepted: %s", error)
            loop.remove_reader(listener.fileno())
            loop.call_later(_PAUSE_S, self._accept_again, listener)
            return
        if sock.family == socket.AF_UNIX:
            try:  # at once, and before it is counted: another user's must not keep this user's out, or end the node
                check_peer(sock)
            except OSError as error:
                _log.warning("a connection is closed: %s", error, extra={"peer": _LOCAL})
                sock.close()
                return
        if len(self._handshakes) + len(self._connections) >= _MOST_CONNECTIONS:
            sock.close()
            return
        peer = where[0] if isinstance(where, tuple) else _LOCAL
        task = loop.create_task(self._admit(sock, str(peer)))
        self._handshakes.add(task)
        self._unauthenticated[task] = None
        if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:  # the oldest may never prove it; others must get in
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cancel()
        self._came.set()
        self._left.clear()
        task.add_done_callback(partial(self._handshake_done, sock))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    async def drain(self, seconds: float) -> None:
        """Take no more loaders and no more tasks; finish those in work, `seconds` at most. Loaders go elsewhere."""
        self.draining = True
        self._stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(connection.drain() for connection in list(self._connections)))

    def _stop_listening(self) -> None:
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
        for path in self._paths:
            Path(path).unlink(missing_ok=True)
        self._paths.clear()

    async def close(self) -> None:
        """End all: listeners, connections, processes."""
        self._stop_listening()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*(host.close() for host in self._hosts.values()), *self._closing)

    def figures(self) -> dict[str, float]:
        """Numbers for an exporter."""
        return {
            "sessions": len(self._quotas),
            "lanes": len(self._connections),
            "refused": self.refusals,
            "processes": sum(host.running for host in self._hosts.values()),
            **{
                name: past + sum(_totals(host)[name] for host in self._hosts.values())
                for name, past in self._past.items()
            },
        }

    # ---------------------------------------------------------------------------------------------- a connection

    async def _admit(self, sock: socket.socket, peer: str) -> None:
        by = {"peer": peer}  # whose line of the log it is
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                wanted = self._tls is not None and sock.family != socket.AF_UNIX
                tls = await speaks_tls(sock)
                if tls == wanted:
                    sock = await secure(sock, self._tls)
                link = Link(sock, frames.MOST_HANDSHAKE)
        except (OSError, TimeoutError) as error:
            _log.debug("a connection ended in its handshake: %r", error, extra=by)
            sock.close()
            return
        opened = False
        try:
            if tls and not wanted:
                raise Refused("it speaks TLS, and this node does not: start the node with --tls-cert")
            if wanted and not tls:
                raise Refused("it does not speak TLS, and this node does: set Service(tls_ca=)")
            opened = await self._handshake(link)
        except (Refused, NotMade, ValueError) as error:
            self.refusals += 1
            text, for_now = (
                line_of(str(error), _REFUSAL),
                isinstance(error, NotMade) or getattr(error, "for_now", False),
            )
            _log.info("a loader at %s was refused: %s", peer, text, extra=by)
            with contextlib.suppress(OSError):
                if tls != wanted:
                    sock.recv(1 << 16)  # what lies unread when a connection is closed would take the answer with it
                link.send(frames.REFUSED, pack_record(Refusal(text, for_now)))
                sock.shutdown(socket.SHUT_WR)
        except (OSError, TimeoutError) as error:
            _log.debug("a connection ended in its handshake: %r", error, extra=by)
        except Exception:  # a fault of ours must not take the node with it
            _log.exception("the handshake of a loader at %s failed", peer, extra=by)
        finally:
            if not opened:
                link.close()

    async def _handshake(self, link: Link) -> bool:
        """Returns whether the link is kept: it is a connection's, or somebody's who stays."""
        async with asyncio.timeout(HANDSHAKE_S):
            hello = read_record(Hello, (await message_of(link, frames.HELLO)).body)
            mine = nonce()
            link.send(frames.CHALLENGE, pack_record(Challenge(self._token is not None, mine)))
            given = read_record(Proof, (await message_of(link, frames.PROOF)).body)
            if not proves(given.proof, self._token, "loader", hello.nonce, mine):
                raise Refused("the token is wrong, or was not given: set token=, or ASYNCLOADER_TOKEN")
            link.most_body = frames.MOST_BODY  # OPENING may have a dataset's state, as RESET may
            self._unauthenticated.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        if self.draining:
            raise Refused("this node is about to end", for_now=True)
        if self._problem:
            raise Refused(self._problem)
        served, arguments = find_served(self._served, hello)
        host = self._host(served, arguments)
        with host.in_use():
            return await self._welcome(link, host, served, hello.nonce, mine)

    async def _welcome(self, link: Link, host: HostProcesses, served: Served, theirs: bytes, mine: bytes) -> bool:
        info = await wait_for(host.dataset_info(), link)
        if info.problem:
            raise Refused(info.problem)
        answer = Welcome(proof(self._token, "node", theirs, mine), info)
        link.send(frames.WELCOME, pack_record(answer))
        async with asyncio.timeout(HANDSHAKE_S):
            message = await message_of(link, frames.OPENING, frames.STAY, frames.PLAN, frames.LOOK)
        if message.header.kind == frames.PLAN:
            await self._plan(link, host, info, read_request(message.body))
            return False
        if message.header.kind == frames.LOOK:
            await self._look(link, host, read_record(Look, message.body).pids)
            return False
        if message.header.kind == frames.STAY:
            self._keep(link)
        else:
            opening = read_opening(message.body)
            if opening.share and (info.iterable or info.stateful):
                raise Refused("share='epoch' is for datasets with an index and without a state of their own")
            if (opening.catalog is None) != (info.shuffle is None):
                raise Refused("this dataset's shards are, or are not, assigned by the loader")
            if opening.setup.fetch_threads and not info.asynchronous:
                host = self._host(served, host.setup.arguments, threads=True)
                with host.in_use():
                    problem = (await wait_for(host.dataset_info(), link)).problem
                    if problem:
                        raise Refused(problem)
                    await self._open(link, host, served, opening, info)
            else:
                await self._open(link, host, served, opening, info)
        return True

    async def _plan(self, link: Link, host: HostProcesses, info: DatasetInfo, request: PlanRequest) -> None:
        """Have the plan of an epoch made, and send it."""
        if info.shuffle is None:
            raise Refused("a plan is made of a dataset whose shards the loader assigns")
        answer = await wait_for(host.plan(request), link)
        async with asyncio.timeout(_PLAN_S):
            for body in messages(answer):
                await send_whole(link, frames.PLANNED, body)

    async def _look(self, link: Link, asked: HostProcesses, pids: Sequence[int]) -> None:
        """Say what processes do that read this dataset."""
        same = [
            host
            for host in self._hosts.values()
            if (host.setup.target, host.setup.arguments) == (asked.setup.target, asked.setup.arguments)
        ]
        found = await asyncio.gather(*(host.look(pids) for host in same))
        async with asyncio.timeout(HANDSHAKE_S):
            await send_whole(link, frames.LOOKED, pack_record(Looked([each for reports in found for each in reports])))

    def _keep(self, link: Link) -> None:
        """A process is there that has no connections now: a node that ends with the last one stays for it."""
        guest: LocalConnection = LocalConnection(link, lambda: self._ended(guest), lambda: None)
        self._connections.add(guest)

    async def _open(self, link: Link, host: HostProcesses, served: Served, opening: Opening, info: DatasetInfo) -> None:
        connection: RelayedConnection | LocalConnection | None = None
        passed: list[socket.socket] = []

        def ended() -> None:
            if connection is not None:
                host.close_connection(number)
                self._forget(quota)
                self._ended(connection)

        def end(sock: socket.socket, number: int) -> WorkerConnection:
            nonlocal connection
            kill = partial(host.kill, number)
            if opening.share:
                dataset = served.target, json.dumps(host.setup.arguments, sort_keys=True, default=str)
                connection = SharedEpochConnection(link, sock, opening, quota, ended, kill, self._cache, dataset)
            elif link.sock.family == socket.AF_UNIX:
                passed.append(sock)
                connection = LocalConnection(link, ended, kill)
            else:
                connection = RelayedConnection(link, sock, opening.credits, quota, ended, kill)
            return connection

        quota = self._quotas.setdefault(opening.loader, MemoryQuota(opening.loader, self._most_memory))
        if not quota.connections:
            told = quota.name, served.target, as_text(host.setup.arguments)
            _log.info("loader %s reads %s with %s", *told, extra={"peer": "loaders"})
        quota.connections += 1
        try:
            await wait_for(host.begun(), link)
            _, number, pid = await host.open(opening, info, end)
        except BaseException:
            self._forget(quota)
            raise
        assert connection is not None
        self._connections.add(connection)
        try:
            link.send(frames.OPENED, pack_record(Opened(pid)), fd=passed[0].fileno() if passed else -1)
        except OSError:
            connection.close()
        finally:
            for sock in passed:
                sock.close()

    def _forget(self, quota: MemoryQuota) -> None:
        quota.connections -= 1
        if not quota.connections:
            del self._quotas[quota.name]
            _log.info("loader %s has ended", quota.name, extra={"peer": "loaders"})
        if not self._quotas:
            self._cache.clear()


def _totals(host: HostProcesses) -> dict[str, float]:
    return {"deaths": host.deaths, "tasks": host.tasks, "busy_seconds": host.busy}
