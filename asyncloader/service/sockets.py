"""The sockets that a node listens at, and who is at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["bound", "check_peer", "read_address", "server_tls"]


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
    """Raise PermissionError if the other end of a Unix socket is another user's. Whoever is root may talk to all."""
    if hasattr(socket, "SO_PEERCRED"):
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid not in (os.getuid(), 0) and os.getuid() != 0:
            raise PermissionError(f"the other end is a process of user {uid}, and this one is user {os.getuid()}'s")


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
    found = await asyncio.get_running_loop().getaddrinfo(*place, type=socket.SOCK_STREAM)
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
