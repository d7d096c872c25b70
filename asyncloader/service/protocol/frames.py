"""Packs and reads the headers of the messages between a loader and a service. Pure: no sockets.

Data path: worker -> node -> [frames] -> connection -> [frames] -> ring -> consumer.

A message is a header of 32 bytes, a body, and a payload; numbers are little-endian:

    4  the bytes ``ALS1``: the protocol and its version
    1  kind
    3  zero
    4  bytes of the body
    4  epoch
    8  task
    8  bytes of the payload

The payload is a batch's bytes, aligned as in the ring that they are received into. The bodies of a worker's messages
are those of `asyncloader.workers.ipc.wire`; the bodies of the handshake's messages are packed by `records.py`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

# Numbers above those of `wire`, because both kinds of messages have this header.
# loader -> node
HELLO, PROOF, OPENING, PING, KILL, PLAN = 64, 65, 66, 67, 68, 70
# node -> loader
CHALLENGE, WELCOME, OPENED, REFUSED, DIED, PONG, DRAINING, PLANNED = 80, 81, 82, 83, 84, 85, 86, 87

MOST_HANDSHAKE: Final = 1 << 17
"""Bytes of a body, at most, until both sides have proved that they have the token."""
MOST_BODY: Final = 64 << 20
"""Bytes of a body, at most: a dataset's state may be large."""

_MAGIC = b"ALS1"
_HEADER = struct.Struct("<4sB3xIIQQ")
HEADER_BYTES: Final = _HEADER.size
assert HEADER_BYTES == 32


class Header(NamedTuple):
    """The first 32 bytes of a message."""

    kind: int
    body: int
    epoch: int
    task: int
    payload: int


def pack_header(kind: int, body: int = 0, epoch: int = 0, task: int = 0, payload: int = 0) -> bytes:
    """Pack the header of a message."""
    return _HEADER.pack(_MAGIC, kind, body, epoch, task, payload)


def unpack_header(data: bytes | bytearray | memoryview, most_body: int, most_payload: int, start: int = 0) -> Header:
    """Read the header that begins at `start`.

    Raises:
        ValueError: these are no header's bytes, or a length is over its limit.
    """
    # Before the body is read: memory for it is allocated only if its length is within the limit.
    magic, kind, body, epoch, task, payload = _HEADER.unpack_from(data, start)
    if magic != _MAGIC:
        raise ValueError(f"broken stream: {magic!r} where a message begins; this is protocol {_MAGIC.decode()}")
    if body > most_body or payload > most_payload:
        raise ValueError(f"broken stream: a message of {body:,} and {payload:,} bytes, over the limit")
    return Header(kind, body, epoch, task, payload)
