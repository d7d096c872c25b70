"""Looks up the names of HTTP servers in threads of its own.

Data path: aiohttp -> [http_names: the addresses of a name] -> aiohttp connects.

aiohttp's own resolver uses the loop's default executor, whose threads may all be busy with calls of the program: then
no request would begin. aiodns, which aiohttp prefers where it is installed, is not used because its errors do not
distinguish a silent name server from a name that does not exist.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

from asyncloader.bridge import in_thread

if TYPE_CHECKING:
    from aiohttp.abc import ResolveResult

_ONLY_NUMBERS = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class SystemResolver:
    """Asks the system, in a thread of its own for each name.

    Has the methods of `aiohttp.abc.AbstractResolver`, which is not its base: aiohttp is imported where it is used.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host, for aiohttp. Raises OSError."""
        return await in_thread(partial(_look_up, host, port, family))

    async def close(self) -> None:
        """Do nothing: a lookup in progress ends by itself, in its thread."""


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found: list[ResolveResult] = []
    for kind, _, protocol, _, place in socket.getaddrinfo(
        host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    ):
        # Also numeric, with the scope of a link-local address of IPv6 ("fe80::1%eth0").
        address, _ = socket.getnameinfo(place, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        found.append(
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": kind,
                "proto": protocol,
                "flags": _ONLY_NUMBERS,
            }
        )
    return found
