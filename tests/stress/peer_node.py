"""A node that turns hostile: stands before a real node, and passes on its messages, up to its act."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from time import monotonic
from typing import Any

import numpy as np
import torch

from asyncloader.service.protocol import frames
from asyncloader.service.protocol.frames import HEADER_BYTES, Header, pack_header, unpack_header
from asyncloader.service.protocol.msgpack_codec import MSGPACK, BatchEncoder
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.workers.ipc import wire
from tests.stress.hostility import ESCAPE, FROM_NODE, Case, any_body, any_head, encoded, rng_of, spoiled, value
from tests.stress.peer_loader import random_of
from tests.stress.wire_inputs import Original, changed, whole

_BATCH = frozenset(["unasked", "template", "error", "withheld", "announced"])
"""Acts that begin at a batch."""
_MOST = 1 << 40
_DRIP_S = 0.05


class HostileNode:
    """The node of a case. Close it in the end.

    Args:
        case: its acts.
        target: the address of the real node.
        folder: where its Unix socket is, if it has one.
    """

    def __init__(self, case: Case, target: str, folder: str) -> None:
        self._case = case
        self._target = target
        self._lock = threading.Lock()
        self._spent = False
        self.acted = 0
        """Connections on which it has turned hostile."""
        self._over = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        if case.place == "unix":
            path = f"{folder}/{case.seed}.sock"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(path)
            self._listener.listen(64)
            self.address = f"unix:{path}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._run(self._accept)

    def _run(self, function: Any, *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = _connected(self._target)
                with self._lock:
                    self._sockets |= {near, far}
                if self._over.is_set():
                    _broken(near)
                self._run(self._forward, near, far)
                self._run(_Played(self, self._case, number, near, far).run)
                number += 1

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """From the loader to the node."""
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def claims(self) -> bool:
        """Whether a connection that has come so far turns hostile now."""
        with self._lock:
            if self._spent and not self._case.always:
                return False
            self._spent = True
            self.acted += 1
            return True

    def wait(self, seconds: float) -> bool:
        """Wait until the case is over. Returns whether it is."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """End all its connections."""
        self._over.set()
        for each in (self._listener, *list(self._sockets)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        if self.address.startswith("unix:"):
            os.unlink(self.address.removeprefix("unix:"))  # noqa: PTH108


def _connected(address: str) -> socket.socket:
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def _broken(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    """Send a RST at once, while another thread reads: closing would wait for that. (To connect to nothing does it.)"""
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    if sock.family == socket.AF_UNIX or ctypes.CDLL(None).connect(sock.fileno(), nowhere, len(nowhere)):
        _broken(sock)


class _Gone(Exception):
    """The connection is over."""


class _Played:
    """One connection, from the node to the loader."""

    def __init__(self, node: HostileNode, case: Case, number: int, near: socket.socket, far: socket.socket) -> None:
        self._node = node
        self._case = case
        self._rng = rng_of(case.seed, f"play {number if case.always else 0}")
        self._near, self._far = near, far
        self._rest = bytearray()
        self._fds: list[int] = []
        self._hostile = False
        self._withholds = False

    def run(self) -> None:
        """Pass on messages until either side ends."""
        number = 0
        try:
            while (message := self._message()) is not None:
                header, data = message
                ready = number >= self._case.at
                if self._case.act in _BATCH:
                    ready = ready and header.kind == wire.RESULT
                number += 1
                if self._withholds and header.kind == wire.RESULT:
                    continue
                if not self._hostile and ready and self._node.claims():
                    self._hostile = True
                    self._act(header, data)
                else:
                    self._send(data)
        except (OSError, _Gone):
            pass
        finally:
            for fd in self._fds:
                os.close(fd)
            if not self._node.wait(0):
                with contextlib.suppress(OSError):
                    self._near.shutdown(socket.SHUT_WR)
            _broken(self._far)

    # -------------------------------------------------------------------------------------------- messages

    def _message(self) -> tuple[Header, bytes] | None:
        if not self._fill(HEADER_BYTES):
            return None
        header = unpack_header(self._rest, _MOST, _MOST)
        size = HEADER_BYTES + header.body + header.payload
        if not self._fill(size):
            return None
        data = bytes(self._rest[:size])
        del self._rest[:size]
        return header, data

    def _fill(self, size: int) -> bool:
        while len(self._rest) < size:
            if self._far.family == socket.AF_UNIX:
                data, fds, _, _ = socket.recv_fds(self._far, 1 << 16, 4)
                self._fds += fds
            else:
                data = self._far.recv(1 << 16)
            if not data:
                return False
            self._rest += data
        return True

    def _send(self, data: bytes, fds: list[int] | None = None) -> None:
        given = self._fds if fds is None else fds
        if given:
            sent = socket.send_fds(self._near, [data[:HEADER_BYTES]], given[:200])
            data = data[sent:]
            while self._fds:
                os.close(self._fds.pop())
        self._near.sendall(data)

    def _sends(self, kind: int, body: bytes, epoch: int = 0, task: int = 0, payload: bytes = b"") -> None:
        self._send(pack_header(kind, len(body), epoch, task, len(payload)) + body + payload)

    # ------------------------------------------------------------------------------------------------ acts

    def _act(self, header: Header, data: bytes) -> None:
        act = self._case.act
        if act not in ("silence", "slow", "reset", "half"):
            getattr(self, f"_{act}")(header, data)
            if act in ("withheld", "draining", "pongs", "log", "died", "refused"):
                return
            if self._case.end == "on" and act not in ("cut", "announced", "sizes", "garbage"):
                return  # after those, the next message would be taken for a batch's bytes
        if act == "slow":
            self._drip(data)
            return
        end = act if act in ("silence", "reset", "half") else self._case.end
        if end == "silence" or act == "announced":
            self._node.wait(60)
        elif end == "reset":
            _reset(self._near)
        elif end == "half":
            self._near.shutdown(socket.SHUT_WR)
            self._node.wait(60)
        raise _Gone

    def _drip(self, data: bytes) -> None:
        """A byte at a time, for as long as the case goes on; what follows waits behind it."""
        until = monotonic() + 60
        for at in range(len(data)):
            self._send(data[at : at + 1])
            if self._node.wait(_DRIP_S) or monotonic() > until:
                raise _Gone

    def _body(self, header: Header, data: bytes) -> bytes:
        return data[HEADER_BYTES : HEADER_BYTES + header.body]

    def _kind(self, header: Header, data: bytes) -> None:
        kind = self._rng.choice([*FROM_NODE, *FROM_NODE, self._rng.randrange(256)])
        self._sends(kind, any_body(self._rng, self._honest(kind, header)), header.epoch, header.task)
        self._send(data)

    def _honest(self, kind: int, header: Header) -> bytes:
        """A body that this kind of message may have."""
        epoch, task = header.epoch, header.task
        if kind in (wire.ERROR, wire.EXHAUSTED, wire.STREAM_ENDED, wire.ALL_DROPPED, wire.BAD_SAMPLES):
            body = MSGPACK.dump_error(KeyError("x"), 0) if kind == wire.ERROR else pack([])
            return wire.pack_answer(kind, epoch, task, 0.1, body)[wire.PREFIX_BYTES :]
        made = {
            wire.STARTED: wire.pack_started(epoch, b"", [])[wire.PREFIX_BYTES :],
            wire.RESET_DONE: wire.pack_reset(wire.RESET_DONE, epoch)[wire.PREFIX_BYTES :],
            wire.ASK: wire.pack_ask(epoch, 1, 2, pack([1]))[wire.PREFIX_BYTES :],
            wire.LOG: pack([30, ESCAPE, "", False]),
            frames.DIED: encoded([1, -9, "killed", "", True, False]),
            frames.REFUSED: encoded(["no", True]),
        }
        return made.get(kind, pack([0, 1]))

    def _sizes(self, header: Header, data: bytes) -> None:
        body = self._body(header, data)
        self._send(any_head(self._rng, self._rng.choice([header.kind, header.kind, *FROM_NODE]), len(body)) + body)

    def _cut(self, header: Header, data: bytes) -> None:
        self._send(data[: self._rng.randrange(len(data))])

    def _skip(self, header: Header, data: bytes) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _twice(self, header: Header, data: bytes) -> None:
        for _ in range(self._rng.choice([2, 2, 3, 100])):
            self._send(data)

    def _value(self, header: Header, data: bytes) -> None:
        body = self._body(header, data)
        if header.kind == wire.RESULT and body:
            self._template(header, data)
            return
        self._sends(header.kind, spoiled(self._rng, body), header.epoch, header.task)

    def _token(self, header: Header, data: bytes) -> None:
        wrong = self._rng.choice([b"", bytes(32), self._rng.randbytes(64), None, 7, value(self._rng)])
        if header.kind == frames.CHALLENGE:
            self._sends(header.kind, encoded([self._rng.choice([True, False, 5]), wrong]))
        elif header.kind == frames.WELCOME:
            self._sends(header.kind, encoded([wrong, []]))
        else:
            self._send(data)

    def _garbage(self, header: Header, data: bytes) -> None:
        self._send(
            self._rng.choice([b"HTTP/1.1 400 Bad\r\n\r\n" + bytes(32), self._rng.randbytes(5000), b"ALS2" + bytes(60)])
        )

    def _flip(self, header: Header, data: bytes) -> None:
        self._send(changed(self._rng, [Original((data,), b"".join), *whole(data)]) or b"x")

    def _result(self, header: Header, batch: Any, task: int, template: bytes | None = None) -> None:
        encoded_batch = BatchEncoder().encode(batch)
        nbytes = encoded_batch.nbytes
        result = wire.Result(header.epoch, task, 0, nbytes, 0, 4, 0.1, same=False, cursor=0)
        body = wire.pack_result(result, encoded_batch.template if template is None else template)
        self._sends(wire.RESULT, body[wire.PREFIX_BYTES :], header.epoch, task, bytes(nbytes))

    def _unasked(self, header: Header, data: bytes) -> None:
        task = self._rng.choice([header.task + 1000, 1 << 62, (1 << 64) - 1])
        for _ in range(self._rng.choice([1, 100])):
            self._result(header, {"x": torch.zeros(self._rng.choice([1, 1000]))}, task)
        self._send(data)

    def _template(self, header: Header, data: bytes) -> None:
        rng = self._rng
        honest = BatchEncoder().encode({"a": torch.zeros(4), "b": np.zeros(3), "c": "x"})
        size = int.from_bytes(honest.template[:4], "little")
        table, structure = honest.template[4 : 4 + size], honest.template[4 + size :]
        if rng.random() < 0.5:
            table = spoiled(rng, table)
        else:
            structure = spoiled(rng, structure)
        length = rng.choice([len(table), len(table), len(table), 0, (1 << 32) - 1, len(table) + len(structure) + 1])
        made = (length & 0xFFFFFFFF).to_bytes(4, "little") + table + structure
        self._result(
            header, {"a": torch.zeros(4), "b": np.zeros(3), "c": "x"}, header.task, rng.choice([made, made, made[:9]])
        )

    def _error(self, header: Header, data: bytes) -> None:
        kind = self._rng.choice([wire.ERROR, wire.ERROR, wire.BAD_SAMPLES, wire.ALL_DROPPED, wire.EXHAUSTED])
        body = any_body(self._rng, MSGPACK.dump_error(KeyError(ESCAPE), 0))
        body = spoiled(self._rng, MSGPACK.dump_error(KeyError("x"), 0)) if self._rng.random() < 0.6 else body
        packed = wire.pack_answer(kind, header.epoch, header.task, 0.1, body)
        self._sends(kind, packed[wire.PREFIX_BYTES :])

    def _died(self, header: Header, data: bytes) -> None:
        rng = self._rng
        death: tuple[Any, ...] = (
            *(rng.choice([1, 0, -5, 1 << 62]), rng.choice([-9, None, 0, "x"]), rng.choice(["killed", ESCAPE])),
            *(rng.choice(["", ESCAPE * 1000]), rng.choice([True, False, False]), rng.choice([True, False])),
        )
        body = encoded(list(death)) if rng.random() < 0.6 else any_body(rng, encoded(list(death)))
        self._sends(frames.DIED, body)

    def _draining(self, header: Header, data: bytes) -> None:
        self._sends(frames.DRAINING, any_body(self._rng, b""))
        self._send(data)

    def _withheld(self, header: Header, data: bytes) -> None:
        self._withholds = True

    def _announced(self, header: Header, data: bytes) -> None:
        cut = HEADER_BYTES + header.body + self._rng.randrange(max(1, header.payload))
        self._send(data[:cut])

    def _descriptors(self, header: Header, data: bytes) -> None:
        made = random_of(self._rng, self._rng.choice([0, 1, 1, 2, 4, 60]))
        try:
            self._send(data, [*made, *(self._fds if self._rng.random() < 0.3 else [])])
        finally:
            for fd in made:
                os.close(fd)

    def _log(self, header: Header, data: bytes) -> None:
        rng = self._rng
        for _ in range(rng.choice([1, 10, 1000])):
            line = rng.choice(
                [[0, 30, ESCAPE, "", False], [1, 30, ESCAPE, "", False], [0, 30, ESCAPE * 50, ESCAPE, False]]
            )
            self._sends(wire.LOG, encoded(line) if rng.random() < 0.7 else spoiled(rng, encoded(line), 1 << 16))
        self._send(data)

    def _pongs(self, header: Header, data: bytes) -> None:
        self._send(pack_header(frames.PONG) * self._rng.choice([10, 20_000]))
        self._send(data)

    def _refused(self, header: Header, data: bytes) -> None:
        rng = self._rng
        texts = ["no", "", ESCAPE * 30, "x" * (1 << 20), None, 5, value(rng), [12, "qint8", [1, 1], b"\1"]]
        self._sends(frames.REFUSED, encoded([rng.choice(texts), rng.choice([True, False, None, ESCAPE])]))

    def _info(self, header: Header, data: bytes) -> None:
        rng = self._rng
        if header.kind != frames.WELCOME:
            self._send(data)
            return
        info: list[Any] = [
            rng.choice([False, True, None, 0, -1, 40, 1 << 62, ESCAPE, 1.5, []]) for _ in DatasetInfo._fields
        ]
        self._sends(frames.WELCOME, encoded([b"", info]))
