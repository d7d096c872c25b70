"""What went wrong with a request, and whether it heals. Data path: aiohttp's error -> [trouble] -> retry or error."""

from __future__ import annotations

import ssl
from typing import Self

from asyncloader.transports.errors import TransportError
from asyncloader.transports.retry import error_heals

__all__ = ["Broken"]


class Broken(Exception):
    """A request failed. Stays inside the transport.

    Args:
        kind: one or two words, by which retries are counted.
        text: a clause for people, without secrets.
        heals: whether to try again.
        cause: the original error, None when there is none or its text may hold secrets.
        retry_after: seconds that the server asks to wait, None: not said.
        final: the error to raise in the end; None: a ReadFailed of `text`.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        *,
        heals: bool = True,
        cause: BaseException | None = None,
        retry_after: float | None = None,
        final: TransportError | None = None,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.heals = heals
        self.cause = cause
        self.retry_after = retry_after
        self.final = final

    @classmethod
    def short(cls, position: int, end: int) -> Self:
        """The body ended before the length that its head had stated."""
        return cls("short body", f"the answer ended at byte {position:,} of {end:,}")

    @classmethod
    def corrupt(cls, algorithm: str) -> Self:
        """The body's digest is not the one that its head had declared."""
        return cls("wrong digest", f"the bytes do not have the {algorithm} digest that the server declared")

    @classmethod
    def of(cls, error: BaseException, answering: bool) -> Broken | None:
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
                return cls("connect time-out", "the server did not accept a connection in time")
            case aiohttp.ClientConnectorCertificateError():
                certificate = error.certificate_error
                text = f"the certificate of {error.host}:{error.port} is refused: {certificate}"
                return cls("certificate", text, heals=False, cause=certificate)
            case aiohttp.ClientConnectorError():
                inner = error.os_error
                text = f"no connection to {error.host}:{error.port}: {inner.strerror or inner}"
                return cls("connection", text, heals=error_heals(inner), cause=inner)
            case aiohttp.ServerTimeoutError() | TimeoutError():
                text = "the answer stalled" if answering else "no answer came in time"
                return cls("stalled" if answering else "no answer", text)
            case aiohttp.ClientPayloadError():
                return cls("broken body", "the connection broke in the middle of the answer", cause=error)
            case aiohttp.ClientResponseError():
                # Its own text has the whole URL in it.
                return cls("not http", f"the answer is not legal HTTP: {error.message[:200]!r}", heals=False)
            case aiohttp.ClientOSError():
                heals = error_heals(error) or isinstance(error.__cause__, ssl.SSLEOFError)
                return cls("connection", f"the connection broke: {error.strerror or error}", heals=heals, cause=error)
            case aiohttp.ClientConnectionError():
                return cls("connection", f"the connection broke: {type(error).__name__}", cause=error)
            case aiohttp.ClientError():
                return cls("request", f"the request cannot be made: {type(error).__name__}", heals=False)
            case OSError():
                return cls("connection", f"the connection broke: {error}", heals=error_heals(error), cause=error)
            case _:
                return None
