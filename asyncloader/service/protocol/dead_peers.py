"""Ends a node's connection to a loader whose machine has gone without a word, while data for it is on the way.

Data path: none; beside a loader's connection.

Keepalive finds such a machine only while nothing is on the way to it. Otherwise the kernel repeats the data for some
fifteen minutes, and the node would keep the loader's memory for as long. `TCP_USER_TIMEOUT` is no way out: it also ends
a connection whose window is closed, and the window of a trainer that computes for a minute is. The kernel of a living
machine acknowledges what comes all the same, probes of a closed window too: that tells the two apart.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import weakref

_log = logging.getLogger("asyncloader")

_EVERY_S = 5.0
_SILENT_MS = 20_000  # without an acknowledgement
_UNANSWERED_MS = 3_000  # since data was last sent or repeated: its acknowledgement may be on the way
_PROBES = 3  # of a closed window, each later than the one before, without an answer
_INFO = struct.Struct("=3xB20xI16xI8xI")  # of `struct tcp_info`: probes, unacked, last_data_sent, last_ack_recv


def is_dead(info: bytes) -> bool:
    """Whether a connection's `TCP_INFO` shows that the other machine has gone."""
    if len(info) < _INFO.size:
        return False
    probes, on_the_way, since_data, since_acknowledgement = _INFO.unpack_from(info)
    if since_acknowledgement < _SILENT_MS:
        return False
    return bool(probes >= _PROBES or (on_the_way and _UNANSWERED_MS <= since_data < since_acknowledgement))


def end_when_dead(sock: socket.socket) -> None:
    """Look at this connection now and then until it is closed, and shut it down once its other machine has gone: its
    reader sees the end. This does not keep the socket.
    """
    if hasattr(socket, "TCP_INFO") and sock.family != socket.AF_UNIX:
        loop = asyncio.get_running_loop()
        loop.call_later(_EVERY_S, _look, loop, weakref.ref(sock))


def _look(loop: asyncio.AbstractEventLoop, reference: weakref.ref[socket.socket]) -> None:
    sock = reference()
    if sock is None or sock.fileno() < 0:
        return
    try:
        if is_dead(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)):
            text, by = "a loader's connection is ended: its machine has not answered for %d s", sock.getpeername()[0]
            _log.info(text, _SILENT_MS / 1000, extra={"peer": by})
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nor does the kernel wait
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of TLS would have what follows sent in clear
    except OSError:  # the kernel knows already that it has ended
        return
    loop.call_later(_EVERY_S, _look, loop, reference)
