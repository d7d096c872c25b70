"""The sockets that a node listens at, and who is at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from asyncloader.bridge import in_thread

_UCRED = struct.Struct("@iII")  # process, user, group
_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1  # of macOS, which Python does not name
_XUCRED = struct.Struct("@IIh16I")  # version, user, number of groups, groups


class OtherUser(PermissionError):
    """The other end of a Unix socket is another user's. To connect again is of no use: `final`."""

    final = True


def server_tls(cert: str, key: str | None, ca: str | None) -> ssl.SSLContext:
    """A node's side of TLS: it shows a certificate, and, given `ca`, asks loaders for one that these have signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    if ca is not None:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_peer(sock: socket.socket) -> None:
    """Check that the other end of a Unix socket is a process of this process's user, whoever that is, root included.

    Of a listener, the user is the one that it had when it began to listen.

    Raises:
        OtherUser: it is another user's, or the system does not say whose.
    """
    theirs, ours = _user_of_peer(sock), os.geteuid()
    if theirs is None:
        raise OtherUser(
            f"{sys.platform} does not say whose process is at the other end of a Unix socket: use tcp:// with a token"
        )
    if theirs != ours:
        raise OtherUser(
            f"the other end of the Unix socket is a process of user {theirs}, and this is one of user {ours}: each "
            "user needs a node of its own (asyncloader serve --listen unix:/path, in a folder where nobody else "
            "writes); one node for several users listens at tcp:// and has a token"
        )


def _user_of_peer(sock: socket.socket) -> int | None:
    """The user at the other end, as the kernel noted it; None if this system does not say."""
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return int(user)
    if sys.platform == "darwin":  # pragma: no cover - macOS
        version, user, *_ = _XUCRED.unpack(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
        return int(user) if version == 0 else None
    return None


def read_address(address: str) -> str | tuple[str, int]:
    """The path of ``unix:/path``, or host and port of ``tcp://host:port``, where ``tcp://`` may be left out.

    Raises:
        ValueError: it is neither.
    """
    if address.startswith("unix:/"):
        return address.removeprefix("unix:")
    with contextlib.suppress(ValueError):
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    raise ValueError(f"--listen {address} is no address: give host:port or unix:/path")


async def bound(address: str) -> tuple[socket.socket, str]:
    """Bind a socket. Returns it, and the address with the port that it got.

    Raises:
        ValueError: it is no address.
        OSError: something else is there.
    """
    place = read_address(address)
    if isinstance(place, str):
        path = place
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await _unlink_stale(path)
            mask = os.umask(0o177)  # for this user alone, from the beginning
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
        except BaseException:
            sock.close()
            raise
        return sock, address
    found = await in_thread(partial(socket.getaddrinfo, *place, type=socket.SOCK_STREAM))
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except BaseException:
        sock.close()
        raise
    host, port = sock.getsockname()[:2]
    return sock, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def _unlink_stale(path: str) -> None:
    """Remove the socket of a node that was killed; one that answers is left, and the bind fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, path)
        except ConnectionRefusedError:
            Path(path).unlink()  # noqa: ASYNC240 - it waits for no disk
        except OSError:  # nothing is there; or what is, is no socket, and the bind says so
            return
