"""A request that failed, and whether trying again heals it. Data path: download -> [broken] -> retry or error."""

from __future__ import annotations

from typing import Self

from asyncloader.transports.errors import TransportError

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
