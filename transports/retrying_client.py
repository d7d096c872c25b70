"""Decides whether a failed request is sent again, and records whether each server answers this process.

Data path: http, object_store -> download -> [retrying_client] -> server.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncloader.transports.errors import ReadFailed
from asyncloader.transports.retry import Attempts, RetryCounts, RetryPolicy

if TYPE_CHECKING:
    from asyncloader.transports.client_owner import ClientOwner
    from asyncloader.transports.retry import RequestFailed

_log = logging.getLogger("asyncloader")
_SILENT_S = 5.0  # seconds without progress after which a warning is logged
_LAST_S = 1.0  # seconds for an answer to the attempt that is made when the time is up
_FOLLOWS_S = 1.0  # seconds after a failure within which the next operation shares the time for the first contact

_C = TypeVar("_C")


@dataclass(slots=True)
class _Contact:
    """Whether a server answers this process, whichever client asks."""

    answered: bool = False
    began: float = 0.0  # when the first operation without an answer began
    tried: float = -inf  # when the attempt after the last failure was, or will be, made
    failures: int = 0  # since `began`
    silent: bool = False  # the log has a warning that it does not answer

    def begin(self, now: float) -> float:
        """Return the time from which the first contact's budget counts for an operation that begins now."""
        if now - self.tried > _FOLLOWS_S:
            self.began, self.tried, self.failures = now, now, 0
        return self.began


_contacts: dict[str, _Contact] = {}


def silent_servers() -> list[str]:
    """Return the servers that were logged as not answering this process, and that have not answered since."""
    return [server for server, contact in [*_contacts.items()] if contact.silent]


class RetryingClient(ABC, Generic[_C]):
    """Sends requests below one root and handles their failures. Subclasses add the requests themselves.

    Args:
        owner: has the connections.
        retry: which failures are retried and for how long.
        min_bytes_per_s: the rate below which a response is given up; 0: no least rate.
    """

    def __init__(self, owner: ClientOwner[_C], retry: RetryPolicy, min_bytes_per_s: float = 0.0) -> None:
        self.owner = owner
        self.min_bytes_per_s = min_bytes_per_s
        self.counts = RetryCounts()
        self._retry = retry

    @abstractmethod
    def where(self, path: str | None) -> str:
        """Return the URL of an object, or the nearest known URL, without secrets, for texts. None: of the root."""

    @property
    def server(self) -> str:
        """The name of the server. Clients of one server share the record of whether it answers."""
        return self.where(None)

    @cached_property
    def _contact(self) -> _Contact:
        return _contacts.setdefault(self.server, _Contact())

    @property
    def reached(self) -> bool:
        """Whether the store has answered this process, if only with an error."""
        return self._contact.answered

    def answered(self, *, busy: bool = False) -> None:
        """Note that the store has answered. `busy`: it answered that it cannot serve the request now."""
        contact = self._contact
        contact.answered = True
        if contact.silent and not busy:
            contact.silent = False
            _log.warning("%s answers again", self.where(None), extra={"store": self.server, "silent": False})

    def patience(self, seconds: float) -> float:
        """Return how long to wait for an answer: `seconds`, but less before the store's first answer."""
        contact, first = self._contact, self._retry.first_contact_s
        if contact.answered or not first:
            return seconds
        now = asyncio.get_running_loop().time()
        return min(seconds, max(_LAST_S, contact.begin(now) + first - now))

    @property
    def _policy(self) -> RetryPolicy:
        return self._retry if self.reached else self._retry.at_first_contact

    def attempts(self, began: float, *, share: float = 0.5) -> Attempts:
        """Start to track an operation that has failed once; `share` as in `Attempts`.

        Until the store has answered, operations that follow one another share the time for that.
        """
        contact = self._contact
        since = began if contact.answered else contact.begin(began)
        return Attempts(self._policy, since, attempt=began, share=share)

    def judge(self, path: str | None, failed: RequestFailed, attempts: Attempts, now: float) -> float:
        """Return the seconds to wait before the next attempt, and count it.

        Raises:
            TransportError: the failure must not be retried, or the time is up.
        """
        if not failed.retryable:
            try:
                raise failed.final or self.failure(path, failed) from failed.cause
            finally:
                failed.final = None  # its traceback refers to `failed`: only the garbage collector would free both
        contact, policy = self._contact, self._policy
        contact.failures += 1
        # The store may have answered another operation since: then the whole budget applies here, too.
        attempts.follow(policy)
        verdict = attempts.failed(now, failed.retry_after)
        contact.tried = now + (verdict.delay or 0.0)
        if verdict.delay is None:
            self.counts.give_up()
            number, reason = attempts.failures, verdict.reason
            if not contact.answered and policy.budget_s:
                number = contact.failures
                reason = (
                    f"no answer at all within {policy.budget_s:g} s. Is the address right? "
                    "RetryPolicy(first_contact_s=) is how long to try"
                )
            times = "once" if number == 1 else f"{number} times"
            raise self.failure(path, failed, f"tried {times}: {reason}") from failed.cause
        if not contact.silent and attempts.seconds_without_progress(now) > _SILENT_S:
            contact.silent = True
            _log.warning(
                "%s has not answered for %.0f s (%s); it is tried for %g s, then the read fails",
                *(self.where(None), attempts.seconds_without_progress(now), failed.text, policy.budget_s),
                extra={"store": self.server, "silent": True},
            )
        self.counts.retry(failed.kind, verdict.delay)
        return verdict.delay

    def failure(self, path: str | None, failed: RequestFailed, note: str = "") -> ReadFailed:
        """Make the error of a request that is not retried any more; `path` None: of a listing."""
        subject = "the listing" if path is None else repr(path)
        text = f"reading {subject} failed: {self.where(path)}: {failed.text}{'; ' + note if note else ''}"
        error = ReadFailed(text, path=path)
        error.about_sample = failed.kind == "wrong digest"  # which was declared with this very object
        if isinstance(failed.cause, OSError):
            error.errno = failed.cause.errno
        return error
