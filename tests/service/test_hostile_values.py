"""Values that crash, freeze or fill a process that trusts them, sent to a node and from a node to a loader."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from asyncloader import DataLoader, Service, ServiceUnavailable
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.handshake import Challenge, Hello, Proof, pack_opening, proof
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.service.protocol.records import pack_record, read_record
from asyncloader.workers.ipc import wire
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.hostile_values import VALUES, spoiled
from tests.service.serving import NodeProcess, serving
from tests.stress.wire_inputs import worker_setup

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 5, "num_workers": 2, "shuffle": True}
LENGTH = 40
TOKEN = "correct horse"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), ["numbers"], "--open", "numbers") as made:
        yield made


def numbers() -> Any:
    return definitions.numbers(n=LENGTH)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with DataLoader[Any](numbers(), **OPTIONS) as loader:
        return list(loader)


# --------------------------------------------------------------------------------------------------- to a node


class HostileLoader:
    """A loader that sends any message to a node. `token`: the token of its proof; None: it proves nothing."""

    def __init__(self, connect: Callable[[], socket.socket], token: str | None) -> None:
        self._sock = connect()
        self._sock.settimeout(PATIENCE_S)
        self._token = token
        self._hello = Hello.of(numbers())

    def send(self, kind: int, body: bytes, epoch: int = 0, task: int = 0) -> None:
        """Send a message; the node may have closed the connection."""
        with suppress(OSError):
            self._sock.sendall(frames.pack_header(kind, len(body), epoch, task) + body)

    def receive(self) -> bytes:
        """Receive a message, and return its body."""
        header = frames.unpack_header(self._exactly(frames.HEADER_BYTES), 1 << 20, 1 << 20)
        body = self._exactly(header.body)
        self._exactly(header.payload)
        return body

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = self._sock.recv(nbytes - len(data))
            assert piece, "the node has closed the connection"
            data += piece
        return data

    def shake_hands(self) -> None:
        """Carry out the handshake up to WELCOME."""
        self.send(frames.HELLO, pack_record(self._hello))
        challenge = read_record(Challenge, self.receive())
        shown = proof(self._token, "loader", self._hello.nonce, challenge.nonce)
        self.send(frames.PROOF, pack_record(Proof(shown)))
        self.receive()

    def open(self, start: bytes = b"") -> None:
        """Carry out the handshake up to OPENED."""
        self.shake_hands()
        opening = pack_opening("hostile", 0, 4, worker_setup())
        if start:
            known = pack(tuple(worker_setup().starts[0]))
            assert opening.count(known) == 1
            head = bytes([0xC4, len(known)])
            opening = opening.replace(head + known, b"\xc6" + len(start).to_bytes(4, "big") + start)
        self.send(frames.OPENING, opening)
        self.receive()

    def end(self) -> None:
        """Wait until the node has answered all messages, and close the connection."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(1 << 16):
                pass
        self._sock.close()


def attack(connect: Callable[[], socket.socket], token: str | None, value: bytes) -> None:
    """Send this value as each message that a node reads."""
    for kind in (frames.HELLO, wire.TASK):
        loader = HostileLoader(connect, token)
        loader.send(kind, value)
        loader.end()
    loader = HostileLoader(connect, token)
    loader.send(frames.HELLO, pack_record(Hello.of(numbers())))
    loader.receive()
    loader.send(frames.PROOF, value)
    loader.end()
    for kind in (frames.OPENING, frames.PLAN):
        loader = HostileLoader(connect, token)
        loader.shake_hands()
        loader.send(kind, value)
        loader.end()
    if value:
        loader = HostileLoader(connect, token)
        loader.open(start=value)
        loader.send(wire.TASK, pack([0, 1]))
        loader.end()
    loader = HostileLoader(connect, token)
    loader.open()
    loader.send(wire.TASK, value)
    loader.send(wire.RESET, wire.pack_reset(wire.RESET, 1, value)[wire.PREFIX_BYTES :])
    loader.send(wire.ASSIGNMENT, wire.pack_assignment(1, 0, value)[wire.PREFIX_BYTES :])
    loader.end()


def plainly(node: NodeProcess) -> socket.socket:
    host, _, port = node.tcp.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_to_a_node(node: NodeProcess, expected: list[Any], value: bytes) -> None:
    """After each of the messages the node and its processes are alive, and serve another loader as before."""
    with DataLoader[Any](numbers(), **OPTIONS, max_worker_restarts=0, workers=node.tcp) as loader:
        batches = iter(loader)
        head = [next(batches)]
        attack(lambda: plainly(node), None, value)
        assert_same([*head, *batches], expected)
    assert node.process.poll() is None


# --------------------------------------------------------------------------------------------------- from a node

KINDS = {
    "CHALLENGE": frames.CHALLENGE,
    "WELCOME": frames.WELCOME,
    "OPENED": frames.OPENED,
    "REFUSED": frames.REFUSED,
    "RESULT": wire.RESULT,
    "ERROR": wire.ERROR,
    "STARTED": wire.STARTED,
    "ALL_DROPPED": wire.ALL_DROPPED,
    "BAD_SAMPLES": wire.BAD_SAMPLES,
    "ASK": wire.ASK,
    "COUNTS": wire.COUNTS,
    "LOG": wire.LOG,
    "LEAVING": wire.LEAVING,
    "DIED": frames.DIED,
}


@pytest.mark.thorough
@pytest.mark.parametrize("value", ["a quantized tensor", "integers of one hash", "small arrays"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_from_a_node(node: NodeProcess, expected: list[Any], kind: int, value: str) -> None:
    """After each of the messages the loader gets all batches from another node, and no restart is charged."""
    with spoiled(node.tcp, kind, VALUES[value]) as proxy:
        both = Service(f"{proxy.address},{node.tcp}")
        with DataLoader[Any](numbers(), **OPTIONS, max_worker_restarts=0, workers=both) as loader:
            assert_same(list(loader), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_from_every_node(node: NodeProcess, kind: int) -> None:
    """The loader raises an error that names the node, after a bounded time."""
    with (
        spoiled(node.tcp, kind, VALUES["a quantized tensor"]) as proxy,
        pytest.raises(ServiceUnavailable, match=proxy.address),
    ):
        for _ in DataLoader[Any](numbers(), **OPTIONS, workers=Service(proxy.address, wait=1)):
            pass
