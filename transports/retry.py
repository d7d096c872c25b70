"""Decides which failures are retried, and how long to wait. Pure.

Data path: failed request -> [retry] -> next request, or error.

`RetryPolicy` is the configuration; `Attempts` tracks one operation under it. Neither reads a clock, sleeps or sends:
the caller (`network_client`) reports what failed and when, and gets the time to wait, or the advice to give up.
`RequestFailed` describes one failed request inside the transports.

*The budget is a time, not a number of attempts*: an outage does not end sooner because of more attempts. The time
counts from the last progress, so a download of hours that breaks now and then continues, and one that makes no progress
ends. One attempt uses up at most half of the budget. If it takes longer, either it was receiving bytes, or the process
stood still (it was suspended, or its loop was blocked). Neither is an outage, and without this rule the operation would
give up without a second attempt.

*Exponential back-off with full jitter*: the n-th wait is uniform between 0 and ``min(cap, first * 2**n)`` (Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015). The random generator is separate from those that
datasets use, so a retry never changes a sample.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import NamedTuple, Self

from asyncloader.telemetry.counters import count, span
from asyncloader.transports.errors import TransportError

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529, 530})
"""Statuses that mean "not now": time-outs, throttling, failing servers and gateways. S3 sometimes answers 500
temporarily; 509 and 520 to 530 are sent by web hosts and CDNs when their backend fails. Every other 4xx, and 501 and
505, is about the request itself and will be the same next time.
"""

# Beyond this the cap applies for every sensible `first_delay_s`; keeps 2**n within the range of a float.
_MOST_DOUBLINGS = 60

_DELAY_SECONDS = re.compile(r"[0-9]{1,12}")

# Not the `random` module's shared generator: it belongs to the user, and drawing from it would change their numbers.
_OWN_RANDOM = random.Random()  # noqa: S311 - spreads requests, guards nothing


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed requests are retried. Frozen, picklable, can be shared.

    Args:
        budget_s: seconds without progress after which an operation gives up, 0 or more; one attempt counts for at most
            half of them. 0 never retries.
            Default 120: a rolling restart of a store or of a node's network takes tens of seconds, and users report
            that budgets below 30 s end their runs; much more would hide a wrong address for too long.
        first_contact_s: the same until the store has answered for the first time in this process, 0 or more; at most
            `budget_s`. Default 15: a store that has never answered has more often a wrong address than an outage, and
            users should not wait minutes for the error.
        first_delay_s: upper bound of the first wait, above 0. Default 0.2: a few round trips.
        cap_s: upper bound of any wait, at least `first_delay_s`. Default 10: how long the end of an outage may go
            unnoticed.
        statuses: HTTP statuses that are retried. Default: `RETRYABLE_STATUSES`.

    Raises:
        ValueError: a value is out of its bounds, infinite or not a number.
    """

    budget_s: float = 120.0
    first_delay_s: float = 0.2
    cap_s: float = 10.0
    statuses: frozenset[int] = RETRYABLE_STATUSES
    first_contact_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("budget_s", "first_contact_s"):
            value: float = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more seconds, got {value}; 0 never retries")
        if not (isfinite(self.first_delay_s) and self.first_delay_s > 0):
            raise ValueError(f"first_delay_s must be above 0 seconds, got {self.first_delay_s}")
        if not (isfinite(self.cap_s) and self.cap_s >= self.first_delay_s):
            raise ValueError(f"cap_s must be at least first_delay_s={self.first_delay_s} seconds, got {self.cap_s}")
        object.__setattr__(self, "statuses", frozenset(self.statuses))
        for status in self.statuses:
            if not 400 <= status <= 599:
                raise ValueError(f"statuses must be HTTP errors, 400 to 599; got {status}")

    @classmethod
    def of(cls, retry: Self | None) -> Self:
        """Return the policy that an option ``retry=`` means; None: the default.

        Raises:
            TypeError: it is no policy.
        """
        if isinstance(retry, cls | None):
            return cls() if retry is None else retry
        raise TypeError(f"retry={retry!r} is no RetryPolicy: give RetryPolicy(budget_s=seconds), or None")

    @property
    def at_first_contact(self) -> RetryPolicy:
        """The same policy for a store that has not answered yet."""
        return replace(self, budget_s=min(self.budget_s, self.first_contact_s))

    def delay(self, failures: int, jitter: float) -> float:
        """Return the wait after the `failures`-th failure in a row (from 1); `jitter` is uniform in 0..1."""
        return jitter * min(self.cap_s, self.first_delay_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


class Verdict(NamedTuple):
    """What to do after a failure.

    Attributes:
        delay: seconds to wait before the next attempt; None to give up.
        reason: why to give up, a clause for an error's text; otherwise empty.
    """

    delay: float | None
    reason: str


class Attempts:
    """Tracks the failures of one operation, and the time it has left.

    Args:
        policy: the rules.
        began: when the operation began, in seconds of the caller's clock. Any monotonic clock.
        jitter: returns numbers uniform in 0..1. Default: a generator of this module's own.
        share: the largest part of the budget that an attempt uses up. 1 for attempts that retry internally.
    """

    __slots__ = ("_attempt", "_in_a_row", "_jitter", "_policy", "_share", "_since", "failures")

    def __init__(
        self,
        policy: RetryPolicy,
        began: float,
        jitter: Callable[[], float] = _OWN_RANDOM.random,
        *,
        share: float = 0.5,
    ) -> None:
        self._policy = policy
        self._since = began
        self._attempt = began  # planned start of the attempt in progress
        self._share = share
        self._jitter = jitter
        self._in_a_row = 0
        self.failures = 0

    def follow(self, policy: RetryPolicy) -> None:
        """Continue under another policy."""
        self._policy = policy

    def seconds_without_progress(self, now: float) -> float:
        """Return the seconds without progress so far."""
        return now - self._since

    def progressed(self, now: float) -> None:
        """Note progress: the budget and the back-off start again.

        The caller decides what counts. A single byte is too little: a server that sends one per connection would be
        retried for ever.
        """
        self._since = self._attempt = max(self._since, now)
        self._in_a_row = 0

    def paused(self, seconds: float) -> None:
        """Exclude a time in which the operation was not running, so that it does not use up the budget."""
        self._since += max(0.0, seconds)
        self._attempt += max(0.0, seconds)

    def failed(self, now: float, retry_after: float | None = None) -> Verdict:
        """Decide what to do after a retryable failure.

        The last wait is shortened so that another attempt is made when the budget ends. A wait that the server asks for
        (`retry_after`) is never shortened: if it exceeds the budget, the operation gives up.

        Args:
            now: the time, by the clock of `began`.
            retry_after: seconds that the server asks to wait; None: it does not ask.
        """
        self.failures += 1
        self._in_a_row += 1
        budget = self._policy.budget_s
        # An attempt that took longer was receiving bytes, or the process stood still: the rest of it is no outage.
        self._since += max(0.0, now - self._attempt - self._share * budget)
        verdict = self._judge(budget, self._since + budget - now, retry_after)
        self._attempt = now + (verdict.delay or 0.0)
        return verdict

    def _judge(self, budget: float, left: float, retry_after: float | None) -> Verdict:
        if left <= 0:
            return Verdict(None, "retries are off" if not budget else f"no progress for {budget:g} s, the retry budget")
        delay = self._policy.delay(self._in_a_row, self._jitter())
        if retry_after is None:
            return Verdict(min(delay, left), "")
        if retry_after > left:
            return Verdict(
                None, f"the server asks to wait {retry_after:g} s, and {left:.1f} s of the {budget:g} s budget are left"
            )
        # All clients that were refused get the same time to wait; the jitter spreads them after it.
        return Verdict(min(retry_after + delay, left), "")


@dataclass(slots=True)
class RetryCounts:
    """Retry statistics of one transport in one process, since its creation.

    Attributes:
        kinds: retries by kind of failure: ``"status 503"``, ``"connection"``, ``"stalled"``, ...
        resumed: downloads that continued where they broke.
        given_up: operations that failed in the end with a retryable failure.
        waited_s: seconds of back-off, summed over the operations.
    """

    kinds: Counter[str] = field(default_factory=Counter[str])
    resumed: int = 0
    given_up: int = 0
    waited_s: float = 0.0

    def retry(self, kind: str, delay: float) -> None:
        """Count a retry after `delay` seconds."""
        self.kinds[kind] += 1
        self.waited_s += delay
        count("retries")
        count("retry_wait_s", delay)
        span("retry", 0.0)

    def resume(self) -> None:
        """Count a download that continues."""
        self.resumed += 1
        count("resumed")

    def give_up(self) -> None:
        """Count an operation that failed in the end."""
        self.given_up += 1
        count("given_up")

    @property
    def total(self) -> int:
        """All retries."""
        return self.kinds.total()

    def snapshot(self) -> dict[str, int | float | dict[str, int]]:
        """Return a copy as plain types: ``retries``, ``kinds``, ``resumed``, ``given_up``, ``waited_s``."""
        return {"retries": self.total, **asdict(self), "kinds": dict(self.kinds)}


def asked_delay(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer's ``Retry-After`` asks for; None if it is missing, or no number of seconds."""
    value = headers.get("Retry-After", "").strip()
    return float(value) if _DELAY_SECONDS.fullmatch(value) else None


class RequestFailed(Exception):
    """Describes a failed request. Never leaves the transport.

    Args:
        kind: one or two words, by which retries are counted.
        text: a clause for people, without secrets.
        retryable: whether to retry.
        cause: the original error; None if no error caused it, or its text may contain secrets.
        retry_after: seconds that the server asks to wait; None: it does not ask.
        final: the error to raise in the end; None: a ReadFailed of `text`.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        *,
        retryable: bool = True,
        cause: BaseException | None = None,
        retry_after: float | None = None,
        final: TransportError | None = None,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retryable = retryable
        self.cause = cause
        self.retry_after = retry_after
        self.final = final

    @classmethod
    def short(cls, position: int, end: int) -> Self:
        """Make the failure of a body that ended before the length stated in the response's head."""
        return cls("short body", f"the answer ended at byte {position:,} of {end:,}")
