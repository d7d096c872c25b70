"""Opens the sockets at which a node listens, and checks the user at the other end of a Unix socket."""

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

from asyncloader.base.bridge import in_thread

_UCRED = struct.Struct("@iII")  # process, user, group


class OtherUser(PermissionError):
    """The other end of a Unix socket is another user's. Connecting again would not help: `final`."""

    final = True


def server_tls(cert: str, key: str | None, ca: str | None) -> ssl.SSLContext:
    """Make a node's side of TLS. With `ca`, loaders must show a certificate that these authorities have signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    if ca is not None:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_peer(sock: socket.socket) -> None:
    """Check that the other end of a Unix socket is a process of this process's user. Root is no exception.

    For a listening process, the kernel reports the user at the time when it began to listen.

    Raises:
        OtherUser: it is another user's, or the system does not report the user.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise OtherUser(
            f"{sys.platform} does not say whose process is at the other end of a Unix socket: use tcp:// with a token"
        )
    # The user that the kernel stored at connection.
    _, theirs, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    ours = os.geteuid()
    if theirs != ours:
        raise OtherUser(
            f"the other end of the Unix socket is a process of user {theirs}, and this is one of user {ours}: each "
            "user needs a node of its own (asyncloader serve --listen unix:/path, in a folder where nobody else "
            "writes); one node for several users listens at tcp:// and has a token"
        )


def read_address(address: str) -> str | tuple[str, int]:
    """Return the path of ``unix:/path``, or host and port of ``tcp://host:port``, where ``tcp://`` may be omitted.

    Raises:
        ValueError: the address has neither form.
    """
    if address.startswith("unix:/"):
        return address.removeprefix("unix:")
    with contextlib.suppress(ValueError):
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    raise ValueError(f"--listen {address} is no address: give host:port or unix:/path")


def host_and_port(host: str, port: int) -> str:
    """Return ``host:port``, as in a URL: with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def bind(address: str) -> tuple[socket.socket, str]:
    """Bind a socket to an address. Returns the socket, and the address with its actual port.

    Raises:
        ValueError: it is no address.
        OSError: the address is in use, or not available.
    """
    place = read_address(address)
    if isinstance(place, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await _unlink_stale(place)
            # For this user alone from the moment in which the file exists. The mask belongs to the whole process, so
            # nothing is awaited until it is restored.
            mask = os.umask(0o177)
            try:
                sock.bind(place)
            finally:
                os.umask(mask)
        except BaseException:
            sock.close()
            raise
        return sock, address
    # Not `loop.getaddrinfo`, which uses the loop's default executor: that is the program's.
    found = await in_thread(partial(socket.getaddrinfo, *place, type=socket.SOCK_STREAM))
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # A node that is started again must not wait until the old node's connections have left TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except BaseException:
        sock.close()
        raise
    host, port = sock.getsockname()[:2]
    return sock, f"tcp://{host_and_port(host, port)}"


async def _unlink_stale(path: str) -> None:
    """Remove the socket file of a node that was killed. The file of a living node stays, so that binding fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, path)
        except ConnectionRefusedError:
            # No process listens at it. Linux also refuses a file that is no socket: that is the user's, and `bind`
            # raises.
            if Path(path).is_socket():  # noqa: ASYNC240 - it waits for no disk
                Path(path).unlink()  # noqa: ASYNC240
        except OSError:  # no such file; or no socket, or a socket that cannot be used: then `bind` raises
            return
