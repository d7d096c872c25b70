"""Bytes that a peer sends where a value is expected, and a proxy that sends them to a loader."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Generator
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from asyncloader.service.protocol import frames
from asyncloader.workers.ipc import wire
from tests.service.proxy import Proxy

_pack: Callable[[Any], bytes] = msgspec.msgpack.encode
_ONE_HASH = [7 + k * ((1 << 61) - 1) for k in range(8)]


def _orbit(count: int) -> list[int]:
    """Return distinct integers of one hash: first those that fit into 64 bits, then larger integers."""
    return [_ONE_HASH[k % 8] + (k // 8) * 8 * ((1 << 61) - 1) for k in range(count)]


def _quantized(data: Any, dtype: str = "qint8") -> list[Any]:
    return [12, dtype, [1, 4], data]


FOUR = b"\1\2\3\4"
VALUES: dict[str, bytes] = {
    # As in the report of the crash: MessagePack's own bytes type.
    "a quantized tensor as it was": _pack([1, 1, [12, "float32", [1, _quantized(FOUR)], b""]]),
    "a quantized tensor": _pack([1, 1, [12, "float32", [1, _quantized(Ext(0, FOUR))], Ext(0, b"")]]),
    "one as a complex number": _pack([7, _quantized(Ext(0, FOUR)), 0.0]),
    "one as a key": _pack([2, _quantized(Ext(0, FOUR)), 1]),
    "one in a set": _pack([3, _quantized(Ext(0, FOUR)), _quantized(Ext(0, FOUR), "quint4x2")]),
    "integers of one hash": _pack([3, *[[6, hex(number)] for number in _orbit(16_000)]]),
    "tuples of one hash": _pack([3, *[[1, [6, hex(number)]] for number in _orbit(8_000)]]),
    "a map": _pack(dict.fromkeys(_ONE_HASH, 1)),
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "empty arrays": b"\xdd" + struct.pack(">I", 900_000) + b"\x90" * 900_000,
    "small arrays": b"\xdd" + struct.pack(">I", 400_001) + b"\x00" + b"\x91\x00" * 400_000,
    "deep arrays": b"\x91" * 100_000,
    "a list announced": b"\xdd\xff\xff\xff\xff",
    "nothing": b"",
}


def body_of_frame(kind: int, value: bytes, epoch: int, task: int) -> bytes:
    """Return the body of a node's message on a worker connection that contains this value."""
    if kind == wire.RESULT:
        table = _pack(([], -1, 0))
        template = len(table).to_bytes(4, "little") + table + value
        result = wire.Result(epoch, task, wire.NO_SLOT, 0, 0, 1, 0.1, same=False)
        return wire.pack_result(result, template)[wire.PREFIX_BYTES :]
    if kind == wire.STARTED:
        return wire.pack_started(epoch, b"", [value])[wire.PREFIX_BYTES :]
    if kind == wire.ASK:
        return wire.pack_ask(epoch, 0, 0, value)[wire.PREFIX_BYTES :]
    if kind in (wire.ERROR, wire.BAD_SAMPLES, wire.ALL_DROPPED, wire.EXHAUSTED, wire.STREAM_ENDED):
        return wire.pack_answer(kind, epoch, task, 0.1, value)[wire.PREFIX_BYTES :]
    return value


class _Spoiling(Proxy):
    """Sends a message of `kind` that contains the value before the node's own message, or before each batch."""

    def __init__(self, target: str, kind: int, value: bytes) -> None:
        self._kind = kind
        handshake = {frames.REFUSED: frames.CHALLENGE, frames.DIED: wire.RESULT}.get(kind, kind)
        self._before = {handshake if handshake >= frames.CHALLENGE else wire.RESULT}
        self._value = value
        super().__init__(target)

    def _forward(self, source: socket.socket, target: socket.socket, allowed: threading.Event, counts: bool) -> None:
        if not counts:
            super()._forward(source, target, allowed, counts)
            return
        while True:
            header = frames.unpack_header(_exactly(source, frames.HEADER_BYTES), 1 << 30, 1 << 40)
            body, payload = _exactly(source, header.body), _exactly(source, header.payload)
            if header.kind in self._before:
                spoiled = body_of_frame(self._kind, self._value, header.epoch, header.task)
                head = frames.pack_header(self._kind, len(spoiled), header.epoch, header.task)
                target.sendall(head + spoiled)
            head = frames.pack_header(header.kind, len(body), header.epoch, header.task, len(payload))
            target.sendall(head + body + payload)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(min(1 << 20, nbytes - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


@contextlib.contextmanager
def spoiled(target: str, kind: int, value: bytes) -> Generator[Proxy]:
    """Return a proxy for a node, which also sends this value to the loader."""
    proxy = _Spoiling(target, kind, value)
    try:
        yield proxy
    finally:
        proxy.close()
