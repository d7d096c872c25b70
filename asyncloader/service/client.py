"""The loader's side of a service: finds nodes, proves who it is, and makes workers of their lanes.

Data path: loader -> pool -> [client] -> connection -> node.

`ServiceWorkers` is a pool's source of workers: where a local pool starts a process, it connects to a node. All of this
blocks and runs in threads that may wait; once a lane is open, the pool's loop has its socket.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlsplit

from asyncloader.counters import Recorder
from asyncloader.errors import ServiceUnavailable, WorkerDied
from asyncloader.service import frames
from asyncloader.service.definition import Defined
from asyncloader.service.dialect import PLAIN
from asyncloader.service.handshake import Hello, Welcome, pack_opening, proof, proves, read_record
from asyncloader.service.host_process import Death
from asyncloader.service.lane_host import Facts
from asyncloader.service.link import Link
from asyncloader.service.remote_channel import RemoteChannel
from asyncloader.service.values import pack, unpack
from asyncloader.workers.dialect import Dialect
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.source import WorkerHandle
from asyncloader.workers.stacks import StackReader

__all__ = ["Service", "ServiceWorkers", "ask_facts"]

_log = logging.getLogger("asyncloader")

_CONNECT_S = 3.0
_ANSWER_S = 30.0  # a node may be making the dataset
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_SAY_AFTER_S = 3.0
_USER_TIMEOUT_MS = 3000
_MOST_THREADS = 16

_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """Where a service is, and how to connect to it.

    Attributes:
        url: addresses, separated by commas: ``tcp://host:port``, ``unix:/path``, or ``dns+tcp://name:port``, which is
            all addresses of that name.
        token: what the service asks for; None: the environment's ``ASYNCLOADER_TOKEN``, or what is in the file that
            ``ASYNCLOADER_TOKEN_FILE`` names; without either, none.
        tls_ca: file with the certificates that nodes' certificates are checked against; None: no TLS.
        tls_cert: file with the certificate that this side shows; None: none.
        tls_key: file with its key.
        wait: seconds to look for a node before an error is raised.
    """

    url: str
    token: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    wait: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.strip():
            raise ValueError(f"workers={self.url!r} is no address: give tcp://host:port or unix:/path")
        for address in self.addresses:
            _check_address(address)
        if not self.wait > 0:
            raise ValueError(f"wait should be a number of seconds above 0, but got wait={self.wait!r}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The parts of the URL."""
        return tuple(part.strip() for part in self.url.split(","))

    def __repr__(self) -> str:  # without the token
        return f"Service({self.url!r})"


def _check_address(address: str) -> None:
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return
    else:
        parts = urlsplit(address)
        with contextlib.suppress(ValueError):
            if parts.scheme in ("tcp", "dns+tcp") and parts.hostname and parts.port:
                return
    raise ValueError(f"workers={address!r} is no address: give tcp://host:port, dns+tcp://name:port or unix:/path")


class _Unreachable(Exception):
    """An address did not give a lane; the text says why. `final`: to ask again is of no use."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class _Node:
    """A connection whose handshake is over."""

    def __init__(self, address: str, link: Link, facts: Facts) -> None:
        self.address = address
        self.link = link
        self.facts = facts


def _places(address: str) -> list[tuple[str, Any]]:
    """Resolve an address: names with what a socket connects to."""
    if address.startswith("unix:"):
        return [(address, address.removeprefix("unix:"))]
    parts = urlsplit(address)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _Unreachable(f"{address}: {error.strerror or error}") from None
    if parts.scheme == "tcp":
        return [(address, found)]
    named = []
    for place in found:
        where: Any = place[4]
        named.append((f"tcp://{where[0]}:{where[1]}", [place]))
    return named


def _connect(service: Service, address: str, place: Any) -> socket.socket:
    if isinstance(place, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(place)
        except BaseException:
            sock.close()
            raise
        return sock
    failure: OSError | None = None
    for family, kind, protocol, _, where in place:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_CONNECT_S)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
            sock.connect(where)
            return sock if service.tls_ca is None else _secured(service, sock, str(urlsplit(address).hostname))
        except OSError as error:
            sock.close()
            failure = error
    raise failure or OSError("no address")


def _secured(service: Service, sock: socket.socket, host: str) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(service.tls_ca)
    if service.tls_cert is not None:
        context.load_cert_chain(service.tls_cert, service.tls_key)
    return context.wrap_socket(sock, server_hostname=host)


def _token(service: Service) -> str | None:
    if service.token is not None:
        return service.token
    path = os.environ.get("ASYNCLOADER_TOKEN_FILE")
    if path and "ASYNCLOADER_TOKEN" not in os.environ:
        return Path(path).read_text().strip()
    return os.environ.get("ASYNCLOADER_TOKEN") or None


def _greet(service: Service, defined: Defined, address: str, place: Any) -> _Node:
    """Connect to a node, up to its WELCOME.

    Raises:
        _Unreachable: it is not there, or refuses.
    """
    link: Link | None = None
    token, hello = _token(service), Hello.of(defined)
    try:
        link = Link(_connect(service, address, place))
        link.send(frames.HELLO, pack(tuple(hello)))
        needed, theirs = unpack(_answer(link, frames.CHALLENGE))
        if needed and token is None:
            raise _Unreachable("it asks for a token: set Service(token=), or ASYNCLOADER_TOKEN", final=True)
        if token is not None and not needed:
            text = "a token was given, and it has none, so it cannot prove that it is the right service"
            raise _Unreachable(text, final=True)
        link.send(frames.PROOF, pack((proof(token, "loader", hello.nonce, theirs),)))
        welcome: Welcome = read_record(Welcome, _answer(link, frames.WELCOME))
        if not proves(welcome.proof, token, "node", hello.nonce, theirs):
            raise _Unreachable("it could not prove that it has the token", final=True)
        return _Node(address, link, welcome.checked_facts())
    except (OSError, ValueError, TypeError, _Unreachable) as error:
        if link is not None:
            link.close()
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        final = getattr(error, "final", False) or isinstance(error, ssl.SSLCertVerificationError)
        raise _Unreachable(f"{address}: {text}", final=final) from None


def _answer(link: Link, kind: int) -> bytes:
    """Wait for the node's answer; raises what the callers here handle."""
    deadline = monotonic() + _ANSWER_S
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    while True:
        for message in link.receive():
            if message.header.kind == frames.REFUSED:
                text, for_now = unpack(message.body)
                raise _Unreachable(f"it refused: {text}", final=not for_now)
            if message.header.kind != kind:
                raise ValueError(f"it sent a message of kind {message.header.kind}, where {kind} was due")
            return message.body
        if link.ended:
            raise ConnectionError("it closed the connection")
        left = deadline - monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise TimeoutError(f"it did not answer for {_ANSWER_S:.0f} seconds")


class ServiceWorkers:
    """The workers of one loader at a service. See `WorkerSource`.

    Args:
        service: where it is.
        defined: what is read.
        credits: tasks that a worker may have outstanding, at most.
    """

    start_method = "service"

    def __init__(self, service: Service, defined: Defined, credits: int) -> None:
        self._service = service
        self._defined = defined
        self._credits = credits
        self._session = secrets.token_hex(8)
        self._closed = threading.Event()
        self._next = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def making(self, workers: Iterable[int], setup: WorkerSetup) -> Generator[Iterator[WorkerHandle]]:
        """Connect, for all of these workers at a time.

        Raises:
            ServiceUnavailable: no node gave a lane in time.
        """
        wanted = list(workers)
        if len(wanted) == 1:
            yield iter([self._connected(wanted[0], setup)])
            return
        with ThreadPoolExecutor(min(_MOST_THREADS, len(wanted)), "asyncloader-connect") as threads:
            futures = [threads.submit(self._connected, worker, setup) for worker in wanted]
        made = [future.result() for future in futures if future.exception() is None]
        try:
            failed = next((future.exception() for future in futures if future.exception() is not None), None)
            if failed is not None:
                raise failed
            given = iter(made)
            made = []
            yield given
        finally:
            for worker in made:
                worker.release()

    def _connected(self, worker: int, setup: WorkerSetup) -> ServedWorker:
        with self._lock:
            first = self._next
            self._next += 1

        def use(node: _Node) -> ServedWorker:
            return self._opened(node, worker, setup)

        return on_any_node(self._service, self._defined, use, first, self._closed)

    def _opened(self, node: _Node, worker: int, setup: WorkerSetup) -> ServedWorker:
        link = node.link
        link.send(frames.OPENING, pack_opening(self._session, worker, self._credits, setup))
        pid = unpack(_answer(link, frames.OPENED))
        if type(pid) is not int:
            raise ValueError("it did not say which process has the worker")
        return ServedWorker(worker, pid, node.address, link)

    def end(self, workers: Sequence[ServedWorker]) -> None:
        """As `WorkerSource`: hang up; the node ends their tasks."""
        for worker in workers:
            worker.release()

    def hang_up(self, workers: Sequence[ServedWorker]) -> None:
        """As `WorkerSource`."""
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As `WorkerSource`: nobody looks for a node any more."""
        self._closed.set()


def on_any_node(
    service: Service,
    defined: Defined,
    use: Callable[[_Node], _T],
    first: int,
    closed: threading.Event | None = None,
) -> _T:
    """Connect to the nodes, one after the other, until one is there and `use` of it succeeds.

    Args:
        service: where they are.
        defined: what is read.
        use: called with the connection, which it then owns; may raise ValueError, OSError or _Unreachable.
        first: which of them comes first.
        closed: set once nobody waits for it.

    Raises:
        ServiceUnavailable: none was there for `service.wait` seconds.
    """
    began, pause, said = monotonic(), _FIRST_PAUSE_S, False
    while True:
        answers: dict[str, str] = {}
        final = True  # whether all have refused for good
        places: list[tuple[str, Any]] = []
        for address in service.addresses:
            try:
                places += _places(address)
            except _Unreachable as error:
                answers[address], final = str(error), False
        for number in range(len(places)):
            address, place = places[(first + number) % len(places)]
            node: _Node | None = None
            try:
                node = _greet(service, defined, address, place)
                return use(node)
            except _Unreachable as error:
                answers[address], final = str(error), final and error.final
            except (OSError, ValueError) as error:
                answers[address], final = f"{address}: {error}", False
            if node is not None:
                node.link.close()
        waited = monotonic() - began
        text = "; ".join(answers.values())
        if final:
            raise ServiceUnavailable(f"no node of {service.url} serves this loader: {text}")
        if waited >= service.wait or (closed is not None and closed.is_set()):
            raise ServiceUnavailable(f"no node of {service.url} was there for {waited:.0f} seconds: {text}")
        if waited >= _SAY_AFTER_S and not said:
            said = True
            _log.warning("no node of %s has been there for %.0f seconds: %s", service.url, waited, text)
        (closed or threading.Event()).wait(min(pause, max(0.0, service.wait - waited)))
        pause = min(_LONGEST_PAUSE_S, 2 * pause)


def ask_facts(service: Service, defined: Defined) -> Facts:
    """What the dataset at the service is.

    Raises:
        ServiceUnavailable: no node was there in time.
    """

    def use(node: _Node) -> Facts:
        node.link.close()
        return node.facts

    return on_any_node(service, defined, use, 0)


_served: weakref.WeakSet[ServedWorker] = weakref.WeakSet()


@functools.cache
def _install_fork_hook() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    """In a forked child: close its copies of all connections, or they would outlive the loader in it."""
    for worker in list(_served):
        worker.release()


class ServedWorker:
    """A logical worker at a node. See `WorkerHandle`."""

    def __init__(self, worker_id: int, pid: int, address: str, link: Link) -> None:
        self.worker_id = worker_id
        self.pid = pid
        self.address = address
        self.place = f"pid {pid} at {address}"
        self.dialect: Dialect = PLAIN
        self.recorder = Recorder()
        self.ready = self.started = self.outside = self.lost = self.released = False
        self.retired: bytes | None = None
        self.kill_reason = ""
        self.suspect: int | None = None
        self.process: Any = self
        self.stacks: StackReader | None = None
        _install_fork_hook()
        _served.add(self)
        self._link = link
        self.channel: Any = self._passed() if link.fds else RemoteChannel(link)

    def _passed(self) -> Channel:
        sock = socket.socket(fileno=self._link.fds.popleft())
        sock.setblocking(False)
        return Channel(sock)

    @property
    def _direct(self) -> bool:
        return isinstance(self.channel, Channel)

    @property
    def death_fd(self) -> int:
        """As `WorkerHandle`."""
        return self._link.fileno() if self._direct else int(self.channel.gone_fd)

    @property
    def alive(self) -> bool:
        """As `WorkerHandle`. Whether the connection still stands, as far as is known here."""
        if self.released or self.channel.ended:
            return False
        poll = select.poll()
        poll.register(self.death_fd, select.POLLIN)
        poll.register(self.channel.fileno(), getattr(select, "POLLRDHUP", 0))
        return not poll.poll(0)

    @property
    def left(self) -> bool:
        """True: nobody but this process writes to its ring."""
        return not self._direct

    def dumps(self, value: Any) -> bytes:
        """As `WorkerHandle`."""
        return PLAIN.dumps(value)

    def death(self) -> WorkerDied:
        """As `WorkerHandle`. What the node said; if it said nothing, the worker itself may be well."""
        said, why = (None, "") if self._direct else (self.channel.death, self.channel.why)
        if self._direct:
            with contextlib.suppress(ValueError):
                said = next((each.body for each in self._link.receive() if each.header.kind == frames.DIED), None)
            why = "the node closed the connection"
        if said is not None:
            with contextlib.suppress(ValueError):
                death: Death = read_record(Death, said)
                self.lost = not (death.blamed or death.shared)
                self.outside = death.shared
                reason = " ".join(filter(None, (f"It was at {self.address}.", self.kill_reason or str(death.reason))))
                exitcode = death.exitcode if type(death.exitcode) is int else None
                return WorkerDied(self.worker_id, self.pid, exitcode, reason, "", str(death.trace))
        self.lost = not self.kill_reason
        return WorkerDied(self.worker_id, self.pid, None, self.kill_reason or f"It was at {self.address}, and {why}.")

    def suspected(self) -> int | None:
        """None: standard error is the node's."""
        return None

    def cleared(self) -> None:
        """Do nothing."""

    def kill_for(self, reason: str) -> None:
        """As `WorkerHandle`: the node kills the process, if it is at this worker's task."""
        self.kill_reason = reason
        with contextlib.suppress(ConnectionError):
            if self._direct:
                self._link.send(frames.KILL)
            else:
                self.channel.kill()

    def kill(self) -> None:
        """Hang up."""
        self.release()

    def request_stop(self) -> None:
        """Hang up; the node ends what is in work."""
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_WR)

    def release(self) -> None:
        """As `WorkerHandle`."""
        if not self.released:
            self.released = True
            self.channel.close()
            self._link.close()

    def __repr__(self) -> str:
        return f"<ServedWorker {self.worker_id} at {self.address}>"
