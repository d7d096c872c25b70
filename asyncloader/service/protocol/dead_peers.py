"""Ends a node's connection to a loader whose machine has lost its power or its network, while data is on its way there.

Keepalive finds such a machine only while no data is on the way to it. Otherwise the kernel repeats the data for about
fifteen minutes, and the node would keep the loader's memory for that time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import weakref

from asyncloader.service.protocol.connection import shut_down

_log = logging.getLogger("asyncloader")

_EVERY_S = 5.0
_SILENT_MS = 20_000  # without an acknowledgement
_UNANSWERED_MS = 3_000  # since data was last sent or repeated: before, its acknowledgement may be on the way
_PROBES = 3  # unanswered probes of a closed window; the kernel doubles the time between them
_INFO = struct.Struct("=3xB20xI16xI8xI")  # of `struct tcp_info`: probes, unacked, last_data_sent, last_ack_recv


def is_dead(info: bytes) -> bool:
    """Whether a connection's `TCP_INFO` shows that the other machine does not answer any more."""
    if len(info) < _INFO.size:
        return False
    probes, on_the_way, since_data, since_acknowledgement = _INFO.unpack_from(info)
    # Not `TCP_USER_TIMEOUT`, which also ends a connection whose window is closed, as it is while a trainer computes for
    # a minute. The kernel of a running machine acknowledges data, and probes of a closed window, too.
    if since_acknowledgement < _SILENT_MS:
        return False
    # With neither probes nor data on the way, nothing had to be acknowledged: keepalive watches that connection.
    return bool(probes >= _PROBES or (on_the_way and _UNANSWERED_MS <= since_data < since_acknowledgement))


def end_when_dead(sock: socket.socket) -> None:
    """Check this connection every few seconds until it is closed, and shut it down once the other machine is dead: its
    reader then sees the end. Keeps no reference to the socket.
    """
    if hasattr(socket, "TCP_INFO") and sock.family != socket.AF_UNIX:
        loop = asyncio.get_running_loop()
        # Weak: a socket that is dropped without `close` must not stay open for the timer.
        loop.call_later(_EVERY_S, _look, loop, weakref.ref(sock))


def _look(loop: asyncio.AbstractEventLoop, reference: weakref.ref[socket.socket]) -> None:
    sock = reference()
    if sock is None or sock.fileno() < 0:
        return
    try:
        if is_dead(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)):
            text, by = "a loader's connection is ended: its machine has not answered for %d s", sock.getpeername()[0]
            _log.info(text, _SILENT_MS / 1000, extra={"peer": by})
            # Without this the kernel would keep the unsent data, and repeat it, after the socket is closed.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            shut_down(sock)
    except OSError:  # the connection has ended already
        return
    loop.call_later(_EVERY_S, _look, loop, reference)
