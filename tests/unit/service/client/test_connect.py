"""How long a loader looks for a node, and how long it waits for a node that reports that it is busy."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from asyncloader import Service, ServiceUnavailable
from asyncloader.service.client import connect
from asyncloader.service.client.connect import Search, Unreachable, answer_of, ask_dataset_info, on_any_node
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.handshake import Challenge, Proof, Welcome
from asyncloader.service.protocol.records import DatasetInfo, pack_record, read_record
from tests.helpers.forking import fork
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.certificates import make_authority


@contextmanager
def busy_node(challenges: bool) -> Generator[str]:
    """A peer that sends PONGs without end, at once or instead of its WELCOME."""
    ended = threading.Event()

    def play(sock: socket.socket) -> None:
        with sock:
            body = pack_record(Challenge(False, bytes(32)))
            try:
                sock.sendall(frames.pack_header(frames.CHALLENGE, len(body)) + body if challenges else b"")
                while not ended.wait(0.02):
                    sock.sendall(frames.pack_header(frames.PONG))
            except OSError:
                pass  # the loader has disconnected

    def accept() -> None:
        while not ended.is_set():
            play(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            ended.set()
            socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
            thread.join()


@pytest.mark.parametrize(
    ("challenges", "text"),
    [
        (True, "it said for [01] seconds that it makes the dataset.* give Service.wait=. more"),
        (False, "it sent a message of kind .*, where .* was due"),
    ],
)
def test_a_peer_that_is_busy_for_ever(challenges: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader gives up; such a peer need not even have the token."""
    monkeypatch.setattr(connect, "_LONGEST_ANSWER_S", 0.1)
    with busy_node(challenges) as address, pytest.raises(ServiceUnavailable, match=text):
        ask_dataset_info(Service(address, wait=0.2), definitions.numbers())


@pytest.mark.parametrize("mirrors", [False, True])
def test_a_peer_that_claims_to_have_the_token(mirrors: bool) -> None:
    """The peer is refused, also if it sends the loader's own proof back: it could give wrong samples."""

    def play() -> None:
        for _ in range(2):  # the loader asks again
            link = Link(listener.accept()[0])
            answer_of(link, frames.HELLO)
            link.send(frames.CHALLENGE, pack_record(Challenge(True, bytes(32))))
            given = read_record(Proof, answer_of(link, frames.PROOF)).proof
            link.send(frames.WELCOME, pack_record(Welcome(given if mirrors else b"", DatasetInfo(length=40))))
            link.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        service = Service(f"tcp://127.0.0.1:{listener.getsockname()[1]}", token="secret", wait=0.1)
        playing = threads.submit(play)
        with pytest.raises(ServiceUnavailable, match="it could not prove that it has the token"):
            ask_dataset_info(service, definitions.numbers())
        playing.result(PATIENCE_S)


def test_a_refusal_that_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader asks again before it gives up: a byte that was damaged on the way looks like another version."""
    answers: list[Any] = [Unreachable("another version", final=True), SimpleNamespace(link=None)]
    monkeypatch.setattr(connect, "_handshake", Mock(side_effect=answers))
    used = on_any_node(Service("tcp://127.0.0.1:1"), definitions.numbers(), str)
    assert used == str(answers[1])


def test_nobody_waits_any_more() -> None:
    """A loader that is closed stops waiting for a node that keeps reporting that it is busy, and leaves no thread."""
    search = Search()
    search.closed.set()
    with busy_node(True) as address, pytest.raises(ServiceUnavailable, match="the loader was closed meanwhile"):
        on_any_node(Service(address), definitions.numbers(), lambda _: None, search)


def test_a_fork_while_a_loader_connects() -> None:
    """The child keeps no copy of the connection: the node sees that the loader hangs up, although the child lives."""
    search = Search()
    closed = search.closed
    waits, go = os.pipe()

    def live_on() -> None:
        os.close(go)
        os.read(waits, 1)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        service = Service(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        asking = threads.submit(on_any_node, service, definitions.numbers(), str, search)
        node, _ = listener.accept()
        with node:
            node.settimeout(PATIENCE_S)
            assert node.recv(1)  # the handshake has begun
            child = fork(live_on)
            closed.set()
            node.sendall(b"HTTP".ljust(frames.HEADER_BYTES))
            while node.recv(1 << 16):
                pass
        with pytest.raises(ServiceUnavailable, match="HTTP"):
            asking.result(PATIENCE_S)
    os.close(go)
    os.close(waits)
    child.wait()


def test_what_is_sent_may_be_long() -> None:
    """A message may be longer than the socket takes at once: an opening has the dataset's state."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours)
        body = bytes(4 << 20)

        def play() -> None:
            left = frames.HEADER_BYTES + len(body)
            while left and (data := theirs.recv(1 << 16)):
                left -= len(data)
            theirs.sendall(frames.pack_header(frames.OPENED))

        assert not link.send(frames.OPENING, body)
        thread = threading.Thread(target=play)
        thread.start()
        assert answer_of(link, frames.OPENED) == b""
        thread.join()
        link.close()


def test_a_worker_looks_on_while_others_deliver() -> None:
    """Other workers' batches extend its search; once no more are delivered, it has `wait` seconds left."""

    class Busy(Search):
        tries, last = 0, 0.0

        def order(self, addresses: Sequence[str]) -> Iterable[tuple[int, float]]:
            self.tries += 1
            return super().order(addresses)

        def delivered_at(self) -> float:
            if self.tries < 4:
                self.last = monotonic()
            return self.last

    search = Busy()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    service = Service(f"tcp://127.0.0.1:{port}", wait=0.001)
    with pytest.raises(ServiceUnavailable, match="was there for"):
        on_any_node(service, definitions.numbers(), lambda _: None, search)
    assert search.tries >= 4


def refused(service: Service) -> str:
    """The reason why no node of the service can be used."""
    with pytest.raises(ServiceUnavailable) as caught:
        ask_dataset_info(service, definitions.numbers())
    return str(caught.value)


def test_a_path_with_an_at_sign(tmp_path: Path) -> None:
    """Only an "@" at the beginning stands for an abstract socket."""
    path = tmp_path / "me@host"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        assert f"unix:{path}: Connection refused" in refused(Service(f"unix:{path}", wait=0.01))


def test_a_name_of_ipv6_addresses() -> None:
    """Its nodes are named by addresses that can be read again: for TLS."""
    assert "tcp://[::1]:1: " in refused(Service("dns+tcp://[::1]:1", wait=0.01))


@pytest.mark.parametrize(
    ("certificates", "wait", "named"),
    [
        ({"tls_ca": "no"}, 3600.0, "tls_ca='no' cannot be used: No such file or directory: give PEM files"),
        ({"tls_ca": "empty"}, 0.01, "tls_ca='empty' cannot be used: "),
        ({"tls_ca": "ca", "tls_cert": "ca", "tls_key": "no"}, 3600.0, "tls_cert='ca' with tls_key='no' cannot be used"),
    ],
)
def test_certificates_that_cannot_be_read(
    certificates: dict[str, str], wait: float, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, and does not wait for a file that is missing; the content of a file may be renewed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    Path(make_authority(tmp_path)["ca"]).rename(tmp_path / "ca")
    assert named in refused(Service("tcp://127.0.0.1:1", wait=wait, **certificates))


def test_an_address_of_a_family_that_the_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name's other addresses are tried, and their errors are reported."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        known = (socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname())
    unknown = (255, socket.SOCK_STREAM, 0, "", ("::1", 1, 0, 0))
    for places in ([unknown, known], [known, unknown]):
        monkeypatch.setattr(connect, "_places", lambda address, places=places: [(address, places)])
        assert "tcp://name:1: Connection refused" in refused(Service("tcp://name:1", wait=0.01))
