"""aiohttp's session, owned by one loop and process. Data path: download -> [session: connections] -> server.

What an owner does is in `client_owner`; here is what is aiohttp's. *After a fork* the child makes a session of
its own: the sockets of the parent's are the parent's as well, and so, with epoll, is the set of what the
parent's loop watches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncloader.transports.client_owner import ClientOwner
from asyncloader.transports.errors import TransportError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["SessionOwner"]

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "asyncloader"}


class SessionOwner(ClientOwner["aiohttp.ClientSession"]):
    """The connections of one transport, and its calls in progress.

    Args:
        name: the transport for texts, without secrets.
        requests: requests that are in progress at the same time at most, at least 1.
        connect_s: seconds that one address may take to accept a connection.
    """

    def __init__(self, name: str, requests: int, connect_s: float) -> None:
        super().__init__(name, requests)
        self._connect_s = connect_s

    def open_client(self) -> aiohttp.ClientSession:
        """Make a session. Raises TransportError when aiohttp is missing."""
        try:
            import aiohttp
        except ImportError as error:
            raise TransportError(
                "http and https need aiohttp, which is not installed; install it by: pip install 'asyncloader[http]'"
            ) from error
        return aiohttp.ClientSession(
            # The slots are the limit. The system looks names up, also where aiodns is installed, which aiohttp would
            # prefer: its errors do not tell a name server without an answer from a name that does not exist.
            connector=aiohttp.TCPConnector(limit=0, resolver=aiohttp.ThreadedResolver()),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            headers=_HEADERS,
            read_bufsize=1 << 18,
        )

    async def close_client(self, client: aiohttp.ClientSession) -> None:
        """Close all connections."""
        await client.close()

    @staticmethod
    def leave_to_parent(client: aiohttp.ClientSession) -> object:
        """Keep the connections open, which are the parent's as well. As `ClientOwner.leave_to_parent`."""
        if (connector := client.connector) is None:
            return None
        connector._closed = True  # its finalizer would close the parent's connections
        client.detach()
        return client, connector
