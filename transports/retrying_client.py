"""What becomes of requests that fail, whatever sends them. Data path: failed request -> [client] -> retry or error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncloader.transports.errors import ReadFailed
from asyncloader.transports.retry import Attempts, RetryCounts, RetryPolicy

if TYPE_CHECKING:
    from asyncloader.transports.broken import Broken
    from asyncloader.transports.client_owner import ClientOwner

__all__ = ["RetryingClient"]

_C = TypeVar("_C")


class RetryingClient(ABC, Generic[_C]):
    """Requests below one root. The network's own requests are a subclass's.

    Args:
        owner: has the connections.
        retry: what is tried again and for how long.
    """

    def __init__(self, owner: ClientOwner[_C], retry: RetryPolicy) -> None:
        self.owner = owner
        self.counts = RetryCounts()
        self._retry = retry

    @abstractmethod
    def where(self, path: str | None) -> str:
        """Give the URL of an object, or of what is nearest to it, for texts: without secrets. None: of the root."""

    def attempts(self, began: float, *, share: float = 0.5) -> Attempts:
        """Begin to keep account of an operation that has failed once; `share` as in `Attempts`."""
        return Attempts(self._retry, began, share=share)

    def judge(self, path: str | None, broken: Broken, attempts: Attempts, now: float) -> float:
        """Give the seconds to wait before the next attempt, and count it; raise the error if there is none."""
        if not broken.heals:
            raise broken.final or self.failure(path, broken) from broken.cause
        verdict = attempts.failed(now, broken.retry_after)
        if verdict.delay is None:
            self.counts.give_up()
            times = "once" if attempts.failures == 1 else f"{attempts.failures} times"
            raise self.failure(path, broken, f"tried {times}: {verdict.reason}") from broken.cause
        self.counts.retry(broken.kind, verdict.delay)
        return verdict.delay

    def failure(self, path: str | None, broken: Broken, note: str = "") -> ReadFailed:
        """Make the error of a request that failed for good; `path` None: of a listing."""
        subject = "the listing" if path is None else repr(path)
        text = f"reading {subject} failed: {self.where(path)}: {broken.text}{'; ' + note if note else ''}"
        error = ReadFailed(text, path=path)
        if isinstance(broken.cause, OSError):
            error.errno = broken.cause.errno
        return error
