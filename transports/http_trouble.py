"""What aiohttp's errors mean, and which of them heal. Data path: aiohttp's error -> [trouble] -> retry or error."""

from __future__ import annotations

import ssl

from asyncloader.transports.broken import Broken
from asyncloader.transports.errors import TransportError
from asyncloader.transports.retry import error_heals

__all__ = ["trouble_of"]


def trouble_of(error: BaseException, answering: bool) -> Broken | None:
    """Say what `error` means; None when it is not the network's.

    Args:
        error: what the attempt raised.
        answering: whether the head of the answer had arrived.
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
            text = f"no connection to {error.host}:{error.port}: {inner.strerror or inner}"
            return Broken("connection", text, heals=error_heals(inner), cause=inner)
        case aiohttp.ServerTimeoutError() | TimeoutError():
            text = "the answer stalled" if answering else "no answer came in time"
            return Broken("stalled" if answering else "no answer", text)
        case aiohttp.ClientPayloadError():
            return Broken("broken body", "the connection broke in the middle of the answer", cause=error)
        case aiohttp.ClientResponseError():
            # Its own text has the whole URL in it.
            return Broken("not http", f"the answer is not legal HTTP: {error.message[:200]!r}", heals=False)
        case aiohttp.ClientOSError():
            heals = error_heals(error) or isinstance(error.__cause__, ssl.SSLEOFError)
            return Broken("connection", f"the connection broke: {error.strerror or error}", heals=heals, cause=error)
        case aiohttp.ClientConnectionError():
            return Broken("connection", f"the connection broke: {type(error).__name__}", cause=error)
        case aiohttp.ClientError():
            return Broken("request", f"the request cannot be made: {type(error).__name__}", heals=False)
        case OSError():
            return Broken("connection", f"the connection broke: {error}", heals=error_heals(error), cause=error)
        case _:
            return None
