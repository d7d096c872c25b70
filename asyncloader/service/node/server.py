"""A service's node: listens for loaders, checks their proofs, and connects each to one of its processes.

Data path: loader -> link -> [server] -> worker connection.

The handshake of each connection is a coroutine with a deadline; after it a worker connection has the link. Nothing that
came over a connection is unpickled, and nothing but the served definitions is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncloader.base.peer_text import line_of
from asyncloader.service.node.admission import Refused, Served, as_text, dataset_key, find_served, tls_refusal
from asyncloader.service.node.async_io import message_of, secure, send_whole, wait_for
from asyncloader.service.node.sessions import MemoryQuota, check_files
from asyncloader.service.node.worker_connections import LocalConnection, RelayedConnection
from asyncloader.service.node.worker_host import HostSetup
from asyncloader.service.node.worker_processes import HostProcesses, WorkerConnection
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.definition import PickledDefinition
from asyncloader.service.protocol.handshake import (
    Challenge,
    Hello,
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
from asyncloader.service.protocol.shard_plan import PlanRequest, read_request
from asyncloader.service.protocol.sockets import bind, check_peer
from asyncloader.workers.ipc.segment import memory_limit

_log = logging.getLogger("asyncloader")

DRAIN_S = 30.0
"""Seconds in which a node that is asked to end finishes the tasks in work."""
HANDSHAKE_S = 10.0
"""Seconds that a handshake may take, besides the time in which a process makes its dataset."""
_PLAN_S = 60.0
"""Seconds that a loader may take to receive a plan."""
_PAUSE_S = 0.1
"""Seconds without new connections after one could not be accepted."""
_MOST_CONNECTIONS = 4096
_MOST_UNAUTHENTICATED = 128
_MOST_MEMORY = 0.5  # of the machine's memory, for one loader
_MOST_DATASETS = 8
_LOCAL = "this machine"
_REFUSAL = 2000  # characters of the reason that a loader is given, at most


class Node:
    """Serves definitions.

    Args:
        served: the definitions.
        workers: processes for each definition and set of arguments.
        token: the secret that loaders must prove to have; None: they need none.
        tls: the server's side of TLS; None: plain connections.
    """

    def __init__(
        self,
        served: Sequence[Served],
        workers: int,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._served = {each.definition.name: each for each in served}
        self._most_hosts = len(self._served) + _MOST_DATASETS
        self._workers = workers
        self._token = token
        self._tls = tls
        self._hosts: dict[tuple[str, str, bool], HostProcesses] = {}
        # Totals of processes that were ended: `/metrics` promises counters, which never fall.
        self._past = {"deaths": 0.0, "tasks": 0.0, "busy_seconds": 0.0}
        self._closing: set[asyncio.Task[None]] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._connections: set[WorkerConnection] = set()
        self._sockets: list[socket.socket] = []
        self._paths: list[str] = []
        self._quotas: dict[str, MemoryQuota] = {}  # of the loaders that read here, by their names
        memory = memory_limit()[0]
        self._most_memory = None if memory is None else int(_MOST_MEMORY * memory)
        self.draining = False
        self.refusals = 0

    # ---------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the processes of definitions with fixed arguments, and wait until each dataset is made.

        Raises:
            ValueError: a dataset cannot be made, or not be served.
        """
        # A list, so that the processes of all definitions are started before the first is waited for.
        for host in [self._host(served, served.arguments) for served in self._served.values() if not served.open]:
            try:
                info = await host.dataset_info(self._workers)
            except Refused as error:
                raise ValueError(str(error)) from None
            if info.problem:
                raise ValueError(info.problem)

    def problem(self) -> str:
        """Return why a definition with fixed arguments cannot be served now, as one line; empty if all can."""
        for (target, _, threads), host in self._hosts.items():
            # Processes with threads are started when the first loader asks for them: they may be starting.
            if host.lasting and not host.running and (host.problem or not threads):
                return host.problem or f"no process of {target} has its dataset yet"
        return ""

    def serve(self, served: Served) -> None:
        """Serve this definition from now on, too."""
        self._served.setdefault(served.definition.name, served)

    def _host(self, served: Served, arguments: Mapping[str, Any], *, threads: bool = False) -> HostProcesses:
        key = (*dataset_key(served.target, arguments), threads)
        host = self._hosts.get(key)
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
        """End the processes of a dataset that no loader reads now. Raises `Refused`."""
        # Only datasets with arguments of a loader's choice: the others are kept for the life of the node.
        opened = {served.target for served in self._served.values() if served.open}
        idle = next((key for key, host in self._hosts.items() if key[0] in opened and host.idle), None)
        # Processes that are being ended take memory, too: loaders that ask for ever new arguments must not outrun them.
        if idle is None or len(self._closing) >= _MOST_DATASETS:
            raise Refused(f"{len(self._hosts)} datasets are read here, and it makes no more now", for_now=True)
        self._drop(idle)

    def _drop(self, key: tuple[str, str, bool]) -> None:
        host = self._hosts.pop(key)
        # Before the processes end: their counts are in memory that is released with them.
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
            # Only once it is bound: `_stop_listening` must not remove the file of another node that has the address.
            self._paths.append(address.removeprefix("unix:"))
        self.listen_at(sock)
        return name

    def listen_at(self, sock: socket.socket) -> None:
        """Take connections from a socket that listens."""
        sock.setblocking(False)
        self._sockets.append(sock)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    def _handshake_done(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before `_admit` could close the socket itself
            sock.close()
        self._unauthenticated.pop(task, None)
        self._handshakes.discard(task)

    def _accept(self, listener: socket.socket) -> None:
        # Not `loop.sock_accept`: if it is cancelled at the wrong moment, the connection that it has accepted is lost.
        loop = asyncio.get_running_loop()
        try:
            sock, where = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # the peer has closed it already
            return
        except OSError as error:
            # No descriptor is left. The connection stays in the backlog, and the listener readable: without a pause the
            # loop would do nothing else, and established connections would not go on.
            _log.warning("a connection could not be accepted: %s: raise this node's limit (ulimit -n)", error)
            loop.remove_reader(listener.fileno())
            loop.call_later(_PAUSE_S, self._accept_again, listener)
            return
        if sock.family == socket.AF_UNIX:
            try:
                # Now, before the connection is counted: those of another user must not take this user's places.
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
        if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
            # Not the newest: connections that prove nothing could then keep loaders out for `HANDSHAKE_S`, again and
            # again. A loader proves itself within a few round trips.
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cancel()
        task.add_done_callback(partial(self._handshake_done, sock))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._sockets:  # the node may have stopped listening since
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    async def drain(self, seconds: float) -> None:
        """Refuse new loaders and tasks, and finish the tasks in work, in `seconds` at most. Loaders go elsewhere."""
        self.draining = True
        self._stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # `gather` gets all coroutines before the first runs: each may take its connection out of the set.
                await asyncio.gather(*(connection.drain() for connection in self._connections))

    def _stop_listening(self) -> None:
        # Before the sockets are closed: once the address is free, another node may take it, and the file is its own.
        for path in self._paths:
            Path(path).unlink(missing_ok=True)
        self._paths.clear()
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()

    async def close(self) -> None:
        """End all: listeners, connections, processes."""
        # In this order: a handshake may be about to open a connection, and a connection needs its process.
        self._stop_listening()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        for connection in list(self._connections):  # a copy: each takes itself out of the set
            connection.close()
        await asyncio.gather(*(host.close() for host in self._hosts.values()), *self._closing)

    def figures(self) -> dict[str, float]:
        """Return the numbers for `/metrics`."""
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
        """Carry out a connection's handshake, and refuse or close it if that fails."""
        by = {"peer": peer}  # the log bounds the lines of each peer
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                link = Link(await secure(sock, self._tls), frames.MOST_HANDSHAKE)
        except (OSError, TimeoutError) as error:
            why = tls_refusal(error)
            self.refusals += bool(why)
            level = logging.INFO if why else logging.DEBUG
            _log.log(level, "a loader at %s was refused: %s", peer, why or repr(error), extra=by)
            sock.close()
            return
        # The link has the socket now. A connection that takes the link closes it; otherwise it is closed below.
        opened = False
        try:
            opened = await self._handshake(link, peer)
        except (Refused, ValueError) as error:
            self.refusals += 1
            text = line_of(str(error), _REFUSAL)
            for_now = isinstance(error, Refused) and error.for_now
            _log.info("a loader at %s was refused: %s", peer, text, extra=by)
            with contextlib.suppress(OSError):
                link.send(frames.REFUSED, pack_record(Refusal(text, for_now)))
                link.sock.shutdown(socket.SHUT_WR)
        except (OSError, TimeoutError) as error:
            _log.debug("a connection ended in its handshake: %r", error, extra=by)
        except Exception:  # a fault of ours must not end the node
            _log.exception("the handshake of a loader at %s failed", peer, extra=by)
        finally:
            if not opened:
                link.close()

    async def _handshake(self, link: Link, peer: str) -> bool:
        """Carry out the handshake. Returns whether the link stays open.

        Raises:
            Refused: this loader is not served.
            ValueError: a message cannot be read.
            OSError: the connection ended.
            TimeoutError: the loader took too long.
        """
        # Until the proof, 128 KiB of fixed records are read at most, and JSON is not parsed.
        async with asyncio.timeout(HANDSHAKE_S):
            hello = read_record(Hello, (await message_of(link, frames.HELLO)).body)
            mine = nonce()
            link.send(frames.CHALLENGE, pack_record(Challenge(self._token is not None, mine)))
            given = read_record(Proof, (await message_of(link, frames.PROOF)).body)
            if not proves(given.proof, self._token, "loader", hello.nonce, mine):
                raise Refused("the token is wrong, or was not given: set token=, or ASYNCLOADER_TOKEN")
            # Only now larger bodies: OPENING and RESET may have a dataset's state.
            link.most_body = frames.MOST_BODY
            # From here on no newer connection has this connection ended.
            self._unauthenticated.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        # Reasons of the node's own are given after the proof only.
        if self.draining:
            raise Refused("this node is about to end", for_now=True)
        served, arguments = find_served(self._served, hello)
        host = self._host(served, arguments)
        with host.in_use():  # or `_make_room` could end the processes while the loader waits for them
            return await self._welcome(link, peer, host, served, hello.nonce, mine)

    async def _welcome(
        self, link: Link, peer: str, host: HostProcesses, served: Served, theirs: bytes, mine: bytes
    ) -> bool:
        # Without a deadline of its own: to make a dataset may take minutes, and the loader gets signs of life.
        info = await wait_for(host.dataset_info(), link)
        if info.problem:
            raise Refused(info.problem)
        answer = Welcome(proof(self._token, "node", theirs, mine), info)
        link.send(frames.WELCOME, pack_record(answer))
        async with asyncio.timeout(HANDSHAKE_S):
            message = await message_of(link, frames.OPENING, frames.PLAN)
        if message.header.kind == frames.PLAN:
            await self._plan(link, host, info, read_request(message.body))
            return False
        opening = read_opening(message.body)
        problem = opening.mismatch(info)
        if problem:
            raise Refused(problem)
        # Reads in threads need other processes: whether connections share an event loop is decided at the start.
        if opening.setup.fetch_threads and not info.asynchronous:
            host = self._host(served, host.setup.arguments, threads=True)
        with host.in_use():
            problem = (await wait_for(host.dataset_info(), link)).problem
            if problem:
                raise Refused(problem)
            await self._open(link, peer, host, served, opening, info)
        return True

    async def _plan(self, link: Link, host: HostProcesses, info: DatasetInfo, request: PlanRequest) -> None:
        """Have a process make the plan of an epoch, and send it."""
        if info.shuffle is None:
            raise Refused("a plan is made of a dataset whose shards the loader assigns")
        body = await wait_for(host.plan(request), link)
        if len(body) > frames.MOST_BODY:
            raise Refused(f"a plan of {len(body):,} bytes cannot be sent: write fewer, larger shards")
        async with asyncio.timeout(_PLAN_S):
            await send_whole(link, frames.PLANNED, body)

    async def _open(
        self, link: Link, peer: str, host: HostProcesses, served: Served, opening: Opening, info: DatasetInfo
    ) -> None:
        connection: WorkerConnection | None = None
        passed: list[socket.socket] = []

        def ended() -> None:
            if connection is not None:
                host.close_connection(number)
                self._forget(quota)
                self._connections.discard(connection)

        def make_end(sock: socket.socket, number: int) -> WorkerConnection:
            nonlocal connection
            kill = partial(host.kill, number)
            if link.sock.family == socket.AF_UNIX:
                passed.append(sock)  # the loader gets it: its frames do not pass through the node
                connection = LocalConnection(link, ended, kill)
            else:
                connection = RelayedConnection(link, sock, opening.credits, quota, ended, kill)
            return connection

        dataset = f"{served.target} with {as_text(host.setup.arguments)}"
        made = MemoryQuota(opening.loader, self._most_memory)
        quota = self._quotas.setdefault(opening.loader, made)
        if quota is made:
            _log.info("loader %s at %s reads %s", opening.loader, peer, dataset, extra={"peer": "loaders"})
        # Before anything is awaited: the loader's other connections may end, and the last would drop the quota.
        quota.connections += 1
        try:
            await wait_for(host.begun(), link)
            check_files(link.fileno(), len(self._connections))
            number, pid = await host.open(opening, info, make_end)
        except BaseException as error:
            self._forget(quota)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                # Not the loader's end, for which `_admit` takes an OSError.
                raise Refused("this node can open no more files: raise its limit (ulimit -n)", for_now=True) from None
            raise
        assert connection is not None
        self._connections.add(connection)
        # Before anything is awaited, too: frames of the process are passed on from the event loop, and follow OPENED.
        try:
            link.send(frames.OPENED, pack_record(Opened(pid)), fd=passed[0].fileno() if passed else -1)
        except OSError:
            connection.close()
        finally:
            for sock in passed:
                sock.close()  # the link has a duplicate, if the message has to wait
        if self.draining:  # since this handshake was admitted: `drain` has not seen the connection
            await connection.drain()

    def _forget(self, quota: MemoryQuota) -> None:
        quota.connections -= 1
        if not quota.connections:
            del self._quotas[quota.name]
            _log.info("loader %s has ended", quota.name, extra={"peer": "loaders"})


def _totals(host: HostProcesses) -> dict[str, float]:
    return {"deaths": host.deaths, "tasks": host.tasks, "busy_seconds": host.busy}
