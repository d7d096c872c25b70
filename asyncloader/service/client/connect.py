"""Finds a node of a service, connects to it, and does the loader's side of the handshake.

All functions block; the loader calls them in threads that may wait.
"""

from __future__ import annotations

import errno
import functools
import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlsplit

from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.peer_text import line_of
from asyncloader.base.process_hooks import in_forked_child
from asyncloader.errors import ServiceUnavailable
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.address import Service
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.definition import Defined
from asyncloader.service.protocol.handshake import (
    Challenge,
    Hello,
    Proof,
    Refusal,
    Welcome,
    proof,
    proves,
)
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import DatasetInfo, pack_record, read_record
from asyncloader.service.protocol.shard_plan import Plan, PlanRequest
from asyncloader.service.protocol.sockets import check_peer, host_and_port

_log = logging.getLogger("asyncloader")

_CONNECT_S = 3.0
_GREETING_S = 3.0  # until the first answer of a node
_ANSWER_S = 30.0  # without any message
_LONGEST_ANSWER_S = 600.0
"""Seconds for an answer while the node reports that it works on it, at most, unless `Service.wait` is longer."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_SAY_AFTER_S = 3.0
_USER_TIMEOUT_MS = 3000  # until a worker connection is open; see `RemoteChannel`

_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")  # as OpenSSL's versions have it
_MOST_TEXT = 2200
"""Characters of a node's reason that an error has, at most."""

_T = TypeVar("_T")


class Unreachable(Exception):
    """No worker connection could be opened at an address. The text says why. `final`: asking again is useless."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


@dataclass(frozen=True)
class NodeConnection:
    """A connection whose handshake is over.

    Attributes:
        address: the node's address.
        link: the connection.
        info: the kind and length of the node's dataset.
        wait: seconds for which the node may report that it works on an answer.
        closed: set once the loader does not wait any more.
    """

    address: str
    link: Link
    info: DatasetInfo
    wait: float
    closed: threading.Event

    def answer(self, kind: int) -> bytes:
        """Wait for an answer that may take the node a while. See `answer_of`."""
        return answer_of(self.link, kind, busy=self.wait, closed=self.closed)


def _places(address: str) -> list[tuple[str, Any]]:
    """Resolve an address. Returns names, each with the arguments for a socket."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        # "@" is an abstract socket: the kernel's own name begins with a zero byte.
        return [(address, f"\0{path[1:]}" if path.startswith("@") else path)]
    parts = urlsplit(address)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"{address}: {error.strerror or error}") from None
    # All results of a tcp:// name are ways to one node, tried in order. Each result of a dns+tcp:// name is another
    # node.
    if parts.scheme == "tcp":
        return [(address, found)]
    named = []
    for place in found:
        where: Any = place[4]
        named.append((f"tcp://{host_and_port(*where[:2])}", [place]))
    return named


def _connect(service: Service, address: str, place: Any) -> socket.socket:
    if isinstance(place, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(place)
            # Before the first byte: another user may have put a socket at this path.
            check_peer(sock)
        except BaseException:
            sock.close()
            raise
        return sock
    context = None if service.tls_ca is None else _tls_context(service)
    failure: OSError | None = None
    for family, kind, protocol, _, where in place:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a kernel without IPv6; the error of another address explains more
            failure = failure or error
            continue
        try:
            sock.settimeout(_CONNECT_S)  # the kernel's own limit is some minutes, for each address
            # No pings are sent before the worker connection is open, so the kernel must notice a silent network.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
            sock.connect(where)
            if context is None:
                return sock
            return context.wrap_socket(sock, server_hostname=str(urlsplit(address).hostname))
        except OSError as error:
            sock.close()
            failure = error
    raise failure or OSError("no address")


def _tls_context(service: Service) -> ssl.SSLContext:
    # This protocol checks the certificate and the name. Only the given authorities are trusted, not the system's.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    files = f"tls_ca={service.tls_ca!r}"
    try:
        context.load_verify_locations(service.tls_ca)
        if service.tls_cert is not None:
            files = f"tls_cert={service.tls_cert!r} with tls_key={service.tls_key!r}"
            context.load_cert_chain(service.tls_cert, service.tls_key)
    except OSError as error:
        text = f"{files} cannot be used: {error.strerror or error}: give PEM files that this process can read"
        # Files that are being renewed may be read half, or not fit each other, so their content is not final.
        raise Unreachable(text, final=not isinstance(error, ssl.SSLError)) from None
    return context


_live: LiveObjects[Link] = LiveObjects()


def _close_copies() -> None:
    """In a forked child: close its copies of the connections."""
    # Also of those without a worker: a node may take minutes for its answer, and would not see that the loader hangs up
    # as long as the child runs.
    for link in _live:
        link.close()


def _handshake(service: Service, defined: Defined, address: str, place: Any, closed: threading.Event) -> NodeConnection:
    """Connect to a node, and do the handshake up to its WELCOME.

    Raises:
        Unreachable: the node cannot be reached, or refuses.
        OSError: this process may open no more files.
    """
    link: Link | None = None
    # Outside of the `try`: arguments that cannot be sent are an error of this loader, and no other node would take
    # them.
    token, hello = service.secret(), Hello.of(defined)
    try:
        link = Link(_connect(service, address, place), frames.MOST_HANDSHAKE)
        in_forked_child(_close_copies)
        _live.add(link)
        link.send(frames.HELLO, pack_record(hello))
        try:
            needed, theirs = read_record(Challenge, answer_of(link, frames.CHALLENGE, _GREETING_S))
        except ConnectionError as error:
            raise ConnectionError(f"{error}; is it a node, and does it speak TLS (Service(tls_ca=))?") from None
        if needed and token is None:
            raise Unreachable("it asks for a token: set Service(token=), or ASYNCLOADER_TOKEN", final=True)
        # A program at this address could pretend to be a node that needs no token, and give wrong samples.
        if token is not None and not needed:
            text = "a token was given, and it has none, so it cannot prove that it is the right service"
            raise Unreachable(text, final=True)
        # The loader proves itself first: a node neither makes nor describes a dataset for an unknown loader.
        link.send(frames.PROOF, pack_record(Proof(proof(token, "loader", hello.nonce, theirs))))
        welcome = read_record(Welcome, answer_of(link, frames.WELCOME, busy=service.wait, closed=closed))
        if not proves(welcome.proof, token, "node", hello.nonce, theirs):
            raise Unreachable("it could not prove that it has the token", final=True)
        link.most_body = frames.MOST_BODY  # only now: before, the other side has proved nothing
        return NodeConnection(address, link, welcome.checked_info(), service.wait, closed)
    except (OSError, ValueError, TypeError, Unreachable) as error:
        if link is not None:
            link.close()
        if getattr(error, "errno", None) == errno.EMFILE:
            raise  # this process may open no more files, which is no fault of the node
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        # A wrong certificate, or a node without TLS, does not change while the loader waits.
        final = getattr(error, "final", False) or isinstance(error, ssl.SSLCertVerificationError)
        reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
        if reason in _NO_TLS:
            text, final = "it does not speak TLS: start the node with --tls-cert, or leave tls_ca= out", True
        elif "ALERT" in reason and service.tls_cert is None:
            text, final = "it asks for a certificate: set Service(tls_cert=, tls_key=)", True
        elif "ALERT" in reason:
            why = reason.partition("ALERT_")[2].replace("_", " ").lower()
            text, final = f"it refuses the certificate tls_cert={service.tls_cert!r} ({why}): see its --tls-ca", True
        raise Unreachable(f"{address}: {line_of(str(text), _MOST_TEXT)}", final=final) from None


def answer_of(
    link: Link,
    kind: int,
    seconds: float = _ANSWER_S,
    *,
    busy: float | None = None,
    closed: threading.Event | None = None,
) -> bytes:
    """Wait for the node's answer, and return its body.

    Args:
        link: the connection.
        kind: the answer's kind.
        seconds: seconds without any message, after which the node is given up.
        busy: seconds for which the node may send PONGs before the answer, or `_LONGEST_ANSWER_S` if that is longer.
            None: PONGs are not accepted.
        closed: set once the loader does not wait for the answer any more: the next PONG ends the wait.

    Raises:
        Unreachable: the node refused, or the loader was closed.
        ValueError: the node sent another message.
        OSError: the connection ended, or the time is over.
    """
    began, said = monotonic(), False
    last = began + max(busy or 0.0, _LONGEST_ANSWER_S)
    deadline = began + seconds
    # Not `select.select`, which takes no descriptor above 1,023.
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    while True:
        # The request may be larger than the socket's buffer: it is sent while the answer is awaited.
        poll.modify(link.fileno(), select.POLLIN if link.flush() else select.POLLIN | select.POLLOUT)
        for message in link.receive():
            if message.header.kind == frames.REFUSED:
                text, for_now = read_record(Refusal, message.body)
                raise Unreachable(f"it refused: {line_of(text, _MOST_TEXT)}", final=not for_now)
            if message.header.kind == frames.PONG and busy is not None:
                if closed is not None and closed.is_set():
                    raise Unreachable("the loader was closed meanwhile")
                # Not without an end: a peer that sends PONGs has perhaps not even proved that it is a node.
                deadline = min(monotonic() + seconds, last)
                if not said:
                    said = True
                    _log.warning("a node makes the dataset, or looks for its shards; the loader waits for that")
                continue
            if message.header.kind != kind:
                raise ValueError(f"it sent a message of kind {message.header.kind}, where {kind} was due")
            return message.body
        if link.ended:
            raise link.alert or ConnectionError("it closed the connection")
        left = deadline - monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            if deadline < last:
                raise TimeoutError(f"it did not answer for {seconds:.0f} seconds")
            raise TimeoutError(
                f"it said for {last - began:.0f} seconds that it makes the dataset, or looks for its shards: look at "
                "its log; if that takes longer, give Service(wait=) more"
            )


class Search:
    """A search for a node, without preferences; `ServiceWorkers` has some."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        """Set once the loader does not wait any more."""

    def order(self, addresses: Sequence[str]) -> Iterable[tuple[int, float]]:
        """Return the numbers of these nodes in the order in which they are tried, each with the seconds for which the
        node should still be left alone. Its errors end the search.
        """
        return [(number, 0.0) for number in range(len(addresses))]

    def refused(self, address: str, why: str) -> None:
        """Note that the node at this address could not be used."""

    def delivered_at(self) -> float:
        """Return when the loader's other connections last delivered: while they do, the search goes on."""
        return 0.0


def on_any_node(
    service: Service, defined: Defined, use: Callable[[NodeConnection], _T], search: Search | None = None
) -> _T:
    """Connect to nodes, one after the other, until `use` succeeds with a connection. Returns its result.

    Args:
        service: the service.
        defined: the definition that is read.
        use: called with the connection, which it then owns; may raise ValueError, OSError or Unreachable.
        search: the order of the nodes, and the end of the search.

    Raises:
        ServiceUnavailable: no node could be used, and no other connection delivered, for `service.wait` seconds.
        OSError: this process may open no more files.
    """
    search = search or Search()
    closed = search.closed
    began, pause, said = monotonic(), _FIRST_PAUSE_S, False
    repeated = False  # whether all nodes had refused finally in the round before
    while True:
        answers: dict[str, str] = {}
        unlike: list[str] = []  # the reasons of nodes whose refusal is final
        final = True  # whether all nodes have refused finally
        places: list[tuple[str, Any]] = []
        # Resolved again in each round: pods may have come or gone since.
        for address in service.addresses:
            try:
                places += _places(address)
            except Unreachable as error:
                answers[address], final = str(error), False  # a name may be known later
        soonest = pause
        for number, rest in search.order([address for address, _ in places]):
            address, place = places[number]
            if rest > 0:
                # Not final: the node is left alone for a while, and the search must not end for it.
                answers[address], final, soonest = f"{address}: it delivered nothing", False, min(soonest, rest)
                continue
            try:
                node = _handshake(service, defined, address, place, closed)
                try:
                    used = use(node)
                except BaseException:  # `use` owns the connection only if it has returned
                    node.link.close()
                    raise
            except Unreachable as error:
                answers[address], final = str(error), final and error.final
                if error.final:
                    unlike.append(str(error))
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) == errno.EMFILE:
                    raise
                answers[address], final = f"{address}: {line_of(str(error), _MOST_TEXT)}", False
            else:
                # Only with a node that can be used: otherwise the error names them all. A user should know that a node
                # is left out although the others do its work.
                for text in unlike:
                    _warn_once(text)
                return used
            # Before `refused`: the attempt may have failed because the loader was closed, which is no fault of a node.
            if closed.is_set():
                break
            search.refused(address, answers[address].removeprefix(f"{address}: "))
        now = monotonic()
        # A loader whose other workers deliver makes progress, so the time without progress counts.
        waited = now - max(began, search.delivered_at())
        text = "; ".join(answers.values()) or "none is ready"
        # Every node has another version, definition or dataset: waiting would only delay the error. They were asked
        # twice, because a byte that was damaged on the way looks like another version, or a wrong token.
        if final and answers and repeated:
            raise ServiceUnavailable(f"no node of {service.url} serves this loader: {text}")
        if waited >= service.wait or closed.is_set():
            raise ServiceUnavailable(f"no node of {service.url} was there for {waited:.0f} seconds: {text}")
        if now - began >= _SAY_AFTER_S and not said:
            said = True
            _log.warning("no node of %s has been there for %.0f seconds: %s", service.url, now - began, text)
        repeated = final and bool(answers)
        # A wait that `closed` ends at once. It ends early for a node whose rest is over.
        closed.wait(min(soonest, max(0.0, service.wait - waited)))
        pause = min(_LONGEST_PAUSE_S, 2 * pause)


@functools.lru_cache(256)  # each worker that connects finds the same node
def _warn_once(text: str) -> None:
    _log.warning("a node is not used, for it refuses, or differs from the others: %s", text)


def ask_plan(service: Service, defined: Defined, request: PlanRequest, closed: threading.Event) -> Plan:
    """Have a node plan an epoch over the dataset's shards, which the loader assigns to its workers.

    Raises:
        ServiceUnavailable: no node could be reached in time.
        Exception: the dataset's error.
    """

    def use(node: NodeConnection) -> Plan:
        node.link.send(frames.PLAN, pack_record(request))
        plan = read_record(Plan, node.answer(frames.PLANNED))
        if not (plan.fingerprint or plan.error):
            raise ValueError("broken stream: a plan of no shards that are known")
        node.link.close()
        return plan

    search = Search()
    search.closed = closed
    # The dataset's error is an answer, not a reason to try another node: another node would raise it, too.
    plan = on_any_node(service, defined, use, search)
    if plan.error:
        error = MSGPACK.load_error(plan.error)
        if isinstance(error, Exception):
            raise error
        error.reraise()
    return plan


def ask_dataset_info(service: Service, defined: Defined) -> DatasetInfo:
    """Ask a node for the kind and length of its dataset.

    Raises:
        ServiceUnavailable: no node could be reached in time.
    """

    def use(node: NodeConnection) -> DatasetInfo:
        node.link.close()
        return node.info

    return on_any_node(service, defined, use)
