"""Peers that have proved nothing: other users of the machine, senders of long lines, and of forged log texts."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import threading
import urllib.request
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service, ServiceUnavailable
from asyncloader.service.node.async_io import message_of
from asyncloader.service.node.server import Node
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.handshake import PROTOCOL, Hello, Proof, Refusal
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import pack_record
from asyncloader.service.protocol.sockets import OtherUser, check_peer
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.serving import serving

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 1, "num_workers": 1}
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user, which takes root")

# ------------------------------------------------------------------------------------------------ other users


@contextmanager
def another_user(play: Callable[[], bool]) -> Generator[int]:
    """Context in which a process of another user calls this function; the function must return true."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            os.setuid(NOBODY)
            code = 0 if play() else 1
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@as_root
async def test_another_user_at_root_s_node() -> None:
    """The other user is refused at once, without a handshake; the node's own user is not."""
    name = f"\0asyncloader-{uuid.uuid4().hex}"
    node = Node([], 1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    node.listen_at(listener)

    def intrude() -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(name)
            return sock.recv(1) == b""

    try:
        with another_user(intrude) as pid:
            await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, name)
            link = Link(sock)
            link.send(frames.HELLO, pack_record(Hello(PROTOCOL, "numbers", "{}", "", *Hello.versions(), bytes(32))))
            assert (await message_of(link, frames.CHALLENGE)).header.kind == frames.CHALLENGE
    finally:
        await node.close()


@as_root
def test_a_name_that_another_user_has_taken() -> None:
    """The loader gets an error at once that names the socket's owner and the remedy; that user would refuse us, too."""
    defined = definitions.numbers()
    url = f"unix:@asyncloader-{uuid.uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX)
    begun, begins = os.pipe()

    def squat() -> bool:
        listener.bind(url.removeprefix("unix:").replace("@", "\0", 1))
        listener.listen()
        os.write(begins, b"1")
        sock, _ = listener.accept()
        with pytest.raises(OtherUser, match="is a process of user 0, and this is one of user 65534"):
            check_peer(sock)
        return True

    workers = Service(url, wait=PATIENCE_S)
    with listener, another_user(squat):
        os.read(begun, 1)
        with pytest.raises(ServiceUnavailable) as caught:
            iter(DataLoader[Any](defined, **OPTIONS, workers=workers))
    os.close(begun)
    os.close(begins)
    text = str(caught.value)
    assert text.startswith(f"no node of {url} serves this loader: ")  # and not: no node for 60 seconds
    assert "is a process of user 65534, and this is one of user 0: each user needs a node of its own" in text


# ------------------------------------------------------------------------------------------------ the log

FORGED = "x\n2026-01-01 00:00:00,000 ERROR forged\x1b]0;title\x07\u202e\x9b31m\r"


def test_writers_to_the_log(tmp_path: Path) -> None:
    """They can neither forge a line nor fill a disk: 300 refusals cause some short lines."""
    hello = Hello(PROTOCOL, "numbers", "{}", "", FORGED[:64], FORGED[:64], bytes(32))
    with serving(tmp_path, ["numbers"], listen=["127.0.0.1:0"], workers=1) as node:
        host, _, port = node.tcp.removeprefix("tcp://").rpartition(":")
        for _ in range(300):
            with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
                for kind, record in ((frames.HELLO, hello), (frames.PROOF, Proof(b""))):
                    body = pack_record(record)
                    sock.sendall(frames.pack_header(kind, len(body)) + body)
                answer = b""
                while piece := sock.recv(1 << 16):
                    answer += piece
                assert len(answer) < 4096
                assert b"the loader has asyncloader" in answer
    (path,) = tmp_path.glob("*.log")
    with path.open(newline="") as file:
        log = file.read()
    assert not set(log) & set("\x1b\x07\u202e\x9b\r")
    lines = log.splitlines()
    assert len(lines) < 70
    assert all(re.match(r"20\d\d-\d\d-\d\d \S+ (INFO|WARNING) [a-z]", line) for line in lines)
    assert max(map(len, lines)) < 600
    assert "a loader at 127.0.0.1 was refused: the loader has asyncloader x\\n2026" in log


def test_what_a_node_says_reaches_the_terminal_escaped() -> None:
    """The reason for which a node refuses a loader is escaped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            for _ in range(2):  # the loader asks again
                sock, _ = listener.accept()
                with sock:
                    body = pack_record(Refusal(FORGED * 1000, False))
                    sock.sendall(frames.pack_header(frames.REFUSED, len(body)) + body)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass

        thread = threading.Thread(target=refuse)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(ServiceUnavailable) as caught:
            iter(DataLoader[Any](definitions.numbers(), **OPTIONS, workers=Service(f"tcp://127.0.0.1:{port}", wait=1)))
        thread.join()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000
    assert r"it refused: x\n2026-01-01" in str(caught.value)


def test_errors_of_a_node_s_workers() -> None:
    """They keep their line ends, and lose all characters that a terminal obeys."""
    wrapper = MSGPACK.load_error(pack_record((False, FORGED, "", f"Traceback:\n\t{FORGED}\n", 0, [FORGED])))
    assert wrapper.exc_msg.startswith("Traceback:\n\tx\n2026")
    ours = MSGPACK.load_error(pack_record((True, "LoaderError", FORGED, FORGED, 0, [])))
    for text in (wrapper.exc_msg, *wrapper.notes, str(ours), *ours.__notes__):
        assert text.replace("\n", "").replace("\t", "").isprintable()


# ------------------------------------------------------------------------------------------------ the metrics

REQUESTS = {
    "a long request line": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b""),
    "a long header": (b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b""),
    "a line without an end": (b"a" * 100_000, b""),
    "many headers": (b"GET /healthz HTTP/1.1\r\n" + b"X: 1\r\n" * 10_000 + b"\r\n", b""),
    "no end": (b"GET /healthz HTTP/1.1\r\n", b""),
    "binary": (bytes(range(256)) * 10 + b"\r\n\r\n", b"HTTP/1.1 405"),
    "nothing": (b"", b""),
    "line feeds": (b"GET /healthz HTTP/1.1\n\n", b""),
    "several": (b"GET /healthz HTTP/1.1\r\n\r\n" * 50, b"HTTP/1.1 200"),
    "a body": (b"POST /healthz HTTP/1.1\r\nContent-Length: 9\r\n\r\n" + b"b" * 5000, b"HTTP/1.1 405"),
}


def test_raw_requests_for_metrics(tmp_path: Path) -> None:
    """Each request ends, answered or not; no error is logged, and a probe is answered at the same time."""
    with serving(tmp_path, ["numbers"], "--metrics", "127.0.0.1:0", listen=["127.0.0.1:0"], workers=1) as node:
        address = node.said["metrics"]
        host, _, port = address.removeprefix("http://").rpartition(":")
        for data, begins in REQUESTS.values():
            with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
                answer = b""
                try:
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while piece := sock.recv(1 << 16):
                        answer += piece
                except OSError:  # it was reset in the middle of a request that is too long
                    assert not begins
                assert answer.startswith(begins)
            with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.send(data[: len(data) // 2])  # and then a reset
        with ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S)) for _ in range(500)]
            for sock in slow[-64:]:
                sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
            with urllib.request.urlopen(f"{address}/healthz", timeout=PATIENCE_S) as page:
                assert page.read() == b"ok\n"
            assert slow[-1].recv(1) == b""  # by the time-out, in a few seconds
    (path,) = tmp_path.glob("*.log")
    assert not re.search("ERROR|xception|retrieved", path.read_text())
