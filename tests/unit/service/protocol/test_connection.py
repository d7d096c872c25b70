"""Messages over a socket: whole, in order, however they were cut, and never larger than allowed."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import struct
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.service.protocol import connection as link_module
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.frames import Header, pack_header
from tests.helpers.running import PATIENCE_S
from tests.service.certificates import make_authority

MESSAGES = st.lists(st.tuples(st.integers(0, 63), st.binary(max_size=60), st.binary(max_size=100)), max_size=8)


@contextmanager
def connected(**options: Any) -> Generator[tuple[socket.socket, Link]]:
    ours, theirs = socket.socketpair()
    link = Link(theirs, **options)
    try:
        yield ours, link
    finally:
        ours.close()
        link.close()


@given(MESSAGES, st.data())
def test_messages_arrive_as_they_were_sent(messages: list[tuple[int, bytes, bytes]], data: st.DataObject) -> None:
    """Payloads are stored where the receiver wants them."""
    stream = b"".join(
        pack_header(kind, len(body), 1, number, len(payload)) + body + payload
        for number, (kind, body, payload) in enumerate(messages)
    )
    payloads: dict[int, bytearray] = {}

    def place(header: Header) -> memoryview:
        payloads[header.task] = bytearray(header.payload)
        return memoryview(payloads[header.task])

    got = []
    with connected() as (ours, link):
        link.place, link.most_payload = place, 100
        while stream:
            cut = data.draw(st.integers(1, len(stream)))
            ours.sendall(stream[:cut])
            stream = stream[cut:]
            got += list(link.receive())
        ours.close()
        got += list(link.receive())
        assert link.ended
    assert [(header.kind, body, bytes(payloads.get(header.task, b""))) for header, body in got] == messages


@given(st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    """Any bytes give messages within the limit, or a ValueError."""
    with connected(most_body=50) as (ours, link):
        ours.sendall(data)
        ours.close()
        try:
            for header, body in link.receive():
                assert len(body) <= 50
                assert not header.payload
        except ValueError:
            pass


@pytest.mark.parametrize(("body", "payload"), [(51, 0), (0, 1), ((1 << 32) - 1, 0), (0, (1 << 64) - 1)])
def test_sizes_over_the_limit(body: int, payload: int) -> None:
    """Such messages are refused by the header alone. Without a `place` there may be no payload at all."""
    with connected(most_body=50) as (ours, link):
        ours.sendall(pack_header(1, body, payload=payload))
        with pytest.raises(ValueError, match="over the limit"):
            list(link.receive())


def test_a_reader_that_waits() -> None:
    """Bytes that the socket does not take are kept, in order, and their owner is notified once they were sent."""
    sent: list[int] = []
    payload = os.urandom(1 << 20)
    with connected() as (ours, link):
        done = [
            link.send(1, b"head", task=task, payload=memoryview(payload), sent=partial(sent.append, task))
            for task in range(3)
        ]
        assert done == [False] * 3
        assert not sent
        receiver = Link(ours)
        found: list[tuple[int, bytearray]] = []

        def place(header: Header) -> memoryview:
            found.append((header.task, bytearray(header.payload)))
            return memoryview(found[-1][1])

        receiver.place, receiver.most_payload = place, 1 << 20
        got = 0
        while got < 3:
            link.flush()
            got += len(list(receiver.receive()))
        assert sent == [0, 1, 2]
        assert [(task, bytes(data)) for task, data in found] == [(task, payload) for task in range(3)]


@pytest.mark.loops
async def test_the_end_behind_a_message() -> None:
    """It is read with the message: of a connection that was reset, uvloop calls the reader only once."""
    loop, got = asyncio.get_running_loop(), list[int]()
    ended = loop.create_future()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        link = Link(listener.accept()[0])
    ours.sendall(pack_header(7, 0))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ours.close()

    def read() -> None:
        got.extend(message.header.kind for message in link.receive())
        if link.ended:
            loop.remove_reader(link.fileno())
            ended.set_result(None)

    loop.add_reader(link.fileno(), read)
    async with asyncio.timeout(PATIENCE_S):
        await ended
    link.close()
    assert got == [7]


def test_a_closed_link_lets_go() -> None:
    """The owners of unsent payloads are notified, and descriptors that were to be passed are closed."""
    sent: list[int] = []
    reader, writer = os.pipe()
    with connected() as (_, link):
        while link.send(1, bytes(1 << 16)):
            pass
        link.send(2, payload=memoryview(b"x"), sent=lambda: sent.append(1), fd=reader)
        link.close()
        assert sent == [1]
    os.close(reader)
    os.close(writer)


def test_a_descriptor_of_a_long_message() -> None:
    """The descriptor is received once, although the socket takes the message in several pieces."""
    reader, writer = os.pipe()
    with connected() as (ours, link):
        assert not link.send(1, bytes(1 << 22), fd=writer)
        os.close(writer)
        receiver, got = Link(ours), 0
        while not got:
            link.flush()
            got += len(list(receiver.receive()))
        (passed,) = receiver.fds
        os.write(passed, b"x")
        assert os.read(reader, 1) == b"x"
        receiver.close()
    os.close(reader)


def test_descriptors_that_nobody_takes() -> None:
    """One is kept, and the others are closed: a peer cannot exhaust this process's descriptors."""
    reader, writer = os.pipe()
    with connected() as (ours, link):
        for _ in range(20):
            socket.send_fds(ours, [pack_header(1)], [writer] * 4)
            assert len(list(link.receive())) == 1
            assert len(link.fds) == 1
        os.close(writer)
        os.close(link.fds.popleft())
        assert os.read(reader, 1) == b""  # no copy is open
    os.close(reader)


def test_bytes_that_tls_has_decrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decrypted bytes do not make the socket readable, so a reader that waits for it gets them all at once."""
    files = make_authority(tmp_path)
    node_side, loader_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    node_side.load_cert_chain(files["node_cert"], files["node_key"])
    loader_side.load_verify_locations(files["ca"])
    monkeypatch.setattr(link_module, "_TURN", 1 << 10)
    with connected_by_tcp() as (ours, theirs):
        with ThreadPoolExecutor(1) as threads:
            served = threads.submit(node_side.wrap_socket, theirs, server_side=True)
            sender = loader_side.wrap_socket(ours, server_hostname="localhost")
            receiver = Link(served.result())
        with sender, closing(receiver):
            sender.sendall((pack_header(1, 500) + bytes(500)) * 30)  # one record
            assert select.select([receiver], [], [], PATIENCE_S)[0]
            assert len(list(receiver.receive())) == 30


class CountingSocket(socket.socket):
    """Counts the calls that change its options."""

    changes = 0

    def setsockopt(self, *arguments: Any) -> None:
        self.changes += 1
        super().setsockopt(*arguments)


@contextmanager
def connected_by_tcp() -> Generator[tuple[socket.socket, CountingSocket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        CountingSocket(fileno=server.accept()[0].detach()) as theirs,
    ):
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield ours, theirs


TURN, WAKE = 1 << 15, 1 << 12


@pytest.mark.parametrize("left", [1, WAKE - 1, WAKE, WAKE + 1, TURN])
def test_a_turn_that_ends_within_a_payload(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest wakes the reader, however small: the socket must not wait for more bytes than will follow."""
    monkeypatch.setattr(link_module, "_TURN", TURN)
    monkeypatch.setattr(link_module, "_WAKE", WAKE)
    payload = os.urandom(100 + TURN + left)
    with connected_by_tcp() as (ours, theirs):
        link = Link(theirs)
        poll, got = watched(link, len(payload))
        ours.sendall(pack_header(1, payload=len(payload)) + payload[:100])
        read_when_ready(link, poll)
        ours.sendall(payload[100 : 100 + TURN])
        read_when_ready(link, poll)
        ours.sendall(payload[100 + TURN :])
        while len(got) < 1:
            got += read_when_ready(link, poll)
        assert len(got) == 1


@given(st.lists(st.integers(0, 3 * TURN), min_size=1, max_size=4), st.data())
def test_no_payload_stalls(sizes: list[int], data: st.DataObject) -> None:
    """A reader that waits for its socket gets payloads of all sizes, in whatever pieces they arrive.

    The socket's options change at most once for a payload and once after it, and once where a turn ends.
    """
    stream = b"".join(pack_header(1, 2, payload=size) + b"ab" + bytes(size) for size in sizes)
    with pytest.MonkeyPatch.context() as patch, connected_by_tcp() as (ours, theirs):
        patch.setattr(link_module, "_TURN", TURN)
        patch.setattr(link_module, "_WAKE", WAKE)
        link = Link(theirs)
        poll, got = watched(link, max(sizes))
        changes, pieces = theirs.changes, 0
        while stream:
            cut = data.draw(st.one_of(st.integers(1, TURN), st.integers(1, 2 * WAKE)))  # never more than is read
            ours.sendall(stream[:cut])
            stream, pieces = stream[cut:], pieces + 1
            if poll.poll(0):
                got += link.receive()
        while len(got) < len(sizes):
            got += read_when_ready(link, poll)
        turns = sum(sizes) // TURN
        assert theirs.changes - changes <= pieces + turns + 2 * len(sizes)


def watched(link: Link, most: int) -> tuple[Any, list[Any]]:
    target = bytearray(most)
    link.place, link.most_payload = lambda header: memoryview(target)[: header.payload], most
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    return poll, []


def read_when_ready(link: Link, poll: Any) -> list[Any]:
    assert poll.poll(2000), "the rest of a payload stalls"
    return list(link.receive())
