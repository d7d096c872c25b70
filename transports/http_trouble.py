"""What aiohttp's errors mean, and which of them heal. Data path: aiohttp's error -> [trouble] -> retry or error."""

from __future__ import annotations

import ssl
import time

from asyncloader.transports.broken import Broken
from asyncloader.transports.errors import TransportError
from asyncloader.transports.retry import error_heals, parse_retry_after

__all__ = ["trouble_of"]


def trouble_of(error: BaseException, answering: bool, statuses: frozenset[int]) -> Broken | None:
    """Say what `error` means; None when it is not the network's.

    Args:
        error: what the attempt raised.
        answering: whether the head of the answer had arrived.
        statuses: the statuses that heal.
    """
    if isinstance(error, Broken):
        return error
    if isinstance(error, TransportError) or not isinstance(error, Exception):
        return None
    import aiohttp

    match error:
        case aiohttp.ConnectionTimeoutError():
            return Broken("connect time-out", "the server did not accept a connection in time")
        case aiohttp.ClientConnectorCertificateError():
            certificate = error.certificate_error
            text = f"the certificate of {error.host}:{error.port} is refused: {certificate}"
            return Broken("certificate", text, heals=False, cause=certificate)
        case aiohttp.ClientConnectorError():
            inner = error.os_error
            text = f"no connection to {error.host}:{error.port}: {_words(inner)}"
            return Broken("connection", text, heals=error_heals(inner), cause=inner)
        case aiohttp.ServerTimeoutError() | TimeoutError():
            text = "the answer stalled" if answering else "no answer came in time"
            return Broken("stalled" if answering else "no answer", text)
        case aiohttp.ClientPayloadError():
            return Broken("broken body", "the connection broke in the middle of the answer", cause=error)
        case aiohttp.ClientHttpProxyError():  # https through a proxy: it was asked for a way, and not for the object
            text = f"the proxy answered {error.status} {error.message[:80]}".rstrip()
            asked = error.headers.get("Retry-After") if error.headers is not None else None
            after = parse_retry_after(asked, time.time())
            return Broken(f"proxy {error.status}", text, heals=error.status in statuses, retry_after=after)
        case aiohttp.ClientResponseError():
            # Its own text has the whole URL in it.
            return Broken("not http", f"the answer is not legal HTTP: {error.message[:200]!r}", heals=False)
        case aiohttp.ClientOSError():
            heals = error_heals(error) or isinstance(error.__cause__, ssl.SSLEOFError)
            return Broken("connection", f"the connection broke: {_words(error)}", heals=heals, cause=error)
        case aiohttp.ClientConnectionError():
            return Broken("connection", f"the connection broke: {type(error).__name__}", cause=error)
        case aiohttp.ClientError():
            return Broken("request", f"the request cannot be made: {type(error).__name__}", heals=False)
        case OSError():
            return Broken("connection", f"the connection broke: {error}", heals=error_heals(error), cause=error)
        case _:
            return None


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
