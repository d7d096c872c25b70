"""Which failures heal, and how long to wait for it (pure). Data path: failed request -> [what now?] -> request.

`RetryPolicy` is the configuration, `Attempts` the memory of one operation under it. Neither looks at a clock,
sleeps or sends: the caller says what failed and what time it is, and is told how long to wait, or to give up.

    attempts = Attempts(policy, began=now())
    while True:
        try: return await request()
        except Exception as error:
            verdict = attempts.failed(kind, now())
            if verdict.delay is None: raise ... verdict.reason ...
            await asyncio.sleep(verdict.delay)

*The budget is time, not a number of attempts*: an outage lasts so and so long, however often one asks. The
time counts from the last progress on, so a download of hours that breaks now and then goes on, and one that
gets nowhere ends. One attempt uses up half of the budget at most. One that takes longer was given bytes, or its
process stood still: suspended, or with a loop that somebody blocked. Neither is an outage, and to give up then
would be to give up without a second attempt.

*Exponential back-off with full jitter*: the n-th wait is uniform between 0 and ``min(cap, first * 2**n)``.
Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015, where it needs the fewest calls
of the variants compared. The random source is separate from the ones that data sets use, so a retry never
changes a sample.

*There is no circuit breaker.* It would let reads fail early, and a training run wants them to wait. What else
it is for, sparing a server that is down, the jitter does: 512 reads in flight ask it about 100 times a second.

A request that failed, and whether trying again heals it. Data path: download -> [broken] -> retry or error.
"""

from __future__ import annotations

import errno
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC
from math import isfinite
from typing import NamedTuple, Self

from asyncloader.counters import COUNTERS
from asyncloader.transports.errors import TransportError

__all__ = [
    "HEALING_STATUSES",
    "Attempts",
    "Broken",
    "RetryCounts",
    "RetryPolicy",
    "Verdict",
    "error_heals",
    "parse_retry_after",
]

HEALING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529, 530})
"""Answers that say "not now": time-outs, throttling, servers and gateways in trouble. S3 answers 500 in passing;
509 and 520 to 530 are what web hosts and content networks answer when what is behind them fails. Every other
4xx, and 501 and 505, is an answer about the request itself and will be the same next time."""

_HEALING_ERRNOS = frozenset(
    getattr(errno, name)
    for name in [
        *("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN", "EAGAIN", "EINTR", "EADDRNOTAVAIL"),
    ]
    if hasattr(errno, name)
)

# Past this the bound is the cap for every sensible `first_delay_s`; it keeps 2**n a float.
_MOST_DOUBLINGS = 60

_DELAY_SECONDS = re.compile(r"[0-9]{1,12}")

# Not the module's shared generator: that one belongs to the user, and drawing from it would move their stream.
_OWN_RANDOM = random.Random()  # noqa: S311 - spreads requests, guards nothing


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed requests are tried again. Frozen; pickles; shared freely.

    Args:
        budget_s: seconds without progress after which an operation gives up, 0 or more; one attempt counts for half
            of them at most. 0 never tries again.
            Default 120: a rolling restart of a store or of a node's network takes tens of seconds, and users
            report that budgets below 30 s end their runs; much more would hide a wrong address for too long.
        first_delay_s: upper bound of the first wait, above 0. Default 0.2: a few round trips.
        cap_s: upper bound of any wait, at least `first_delay_s`. Default 10: how long the end of an outage may
            go unnoticed.
        statuses: HTTP statuses that are tried again. Default: `HEALING_STATUSES`.

    Raises:
        ValueError: a value is out of its bounds, infinite or not a number.
    """

    budget_s: float = 120.0
    first_delay_s: float = 0.2
    cap_s: float = 10.0
    statuses: frozenset[int] = HEALING_STATUSES

    def __post_init__(self) -> None:
        if not (isfinite(self.budget_s) and self.budget_s >= 0):
            raise ValueError(f"budget_s must be 0 or more seconds, got {self.budget_s}; 0 never retries")
        if not (isfinite(self.first_delay_s) and self.first_delay_s > 0):
            raise ValueError(f"first_delay_s must be above 0 seconds, got {self.first_delay_s}")
        if not (isfinite(self.cap_s) and self.cap_s >= self.first_delay_s):
            raise ValueError(f"cap_s must be at least first_delay_s={self.first_delay_s} seconds, got {self.cap_s}")
        object.__setattr__(self, "statuses", frozenset(self.statuses))
        for status in self.statuses:
            if not 400 <= status <= 599:
                raise ValueError(f"statuses must be HTTP errors, 400 to 599; got {status}")

    def delay(self, failures: int, jitter: float) -> float:
        """Give the wait after the `failures`-th failure in a row (from 1 on); `jitter` is uniform in 0..1."""
        return jitter * min(self.cap_s, self.first_delay_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


class Verdict(NamedTuple):
    """What to do after a failure.

    Attributes:
        delay: seconds to wait before the next attempt; None to give up.
        reason: why it is given up, a clause for an error's text; empty otherwise.
    """

    delay: float | None
    reason: str


class Attempts:
    """The failures of one operation, and the time it has left.

    Args:
        policy: the rules.
        began: when the operation began, by the caller's clock, in seconds. Any clock that never goes back.
        jitter: gives numbers uniform in 0..1. Default: a generator of this module's own.
        share: how much of the budget one attempt uses up at most. 1 for attempts that try again by themselves.
    """

    __slots__ = ("_attempt", "_in_a_row", "_jitter", "_most", "_policy", "_since", "failures")

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
        self._attempt = began  # when the attempt in progress was to begin
        self._most = share * policy.budget_s
        self._jitter = jitter
        self._in_a_row = 0
        self.failures = 0

    def progressed(self, now: float) -> None:
        """Note that something was gained: the budget and the back-off start again.

        The caller decides what counts. A byte is too little: a server that gives one a connection would be
        asked for ever.
        """
        self._since = self._attempt = max(self._since, now)
        self._in_a_row = 0

    def paused(self, seconds: float) -> None:
        """Leave out a time in which the operation was not under way, so that it does not use up the budget."""
        self._since += max(0.0, seconds)
        self._attempt += max(0.0, seconds)

    def failed(self, now: float, retry_after: float | None = None) -> Verdict:
        """Say what to do after a failure that can heal.

        The last wait is cut so that one more attempt is made when the budget ends. A server's own
        `retry_after` is never cut: when it leads past the budget there is nothing to wait for.

        Args:
            now: the time, by the clock of `began`.
            retry_after: seconds that the server wants to be left alone; None: it did not say.
        """
        self.failures += 1
        self._in_a_row += 1
        budget = self._policy.budget_s
        self._since += max(0.0, now - self._attempt - self._most)
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
        # All that were turned away are told the same moment; the jitter spreads them after it.
        return Verdict(min(retry_after + delay, left), "")


@dataclass(slots=True)
class RetryCounts:
    """What was tried again, for statistics. Counts of one transport in one process, from its making on.

    Attributes:
        kinds: retries by what had failed: ``"status 503"``, ``"connection"``, ``"stalled"``, ...
        resumed: downloads that went on where they had broken.
        given_up: operations that failed at last, although the failure could have healed.
        waited_s: seconds of back-off, summed over the operations.
    """

    kinds: Counter[str] = field(default_factory=Counter[str])
    resumed: int = 0
    given_up: int = 0
    waited_s: float = 0.0

    def retry(self, kind: str, delay: float) -> None:
        """One is made after `delay` seconds."""
        self.kinds[kind] += 1
        self.waited_s += delay
        COUNTERS.add("retries")
        COUNTERS.add("retry_wait_s", delay)

    def resume(self) -> None:
        """A download goes on."""
        self.resumed += 1
        COUNTERS.add("resumed")

    def give_up(self) -> None:
        """An operation failed at last."""
        self.given_up += 1
        COUNTERS.add("given_up")

    @property
    def total(self) -> int:
        """All retries."""
        return self.kinds.total()

    def snapshot(self) -> dict[str, int | float | dict[str, int]]:
        """Give a copy as plain types: ``retries``, ``kinds``, ``resumed``, ``given_up``, ``waited_s``."""
        return {
            "retries": self.total,
            "kinds": dict(self.kinds),
            "resumed": self.resumed,
            "given_up": self.given_up,
            "waited_s": self.waited_s,
        }


def error_heals(error: BaseException) -> bool:
    """Whether trying again may help after this error of the network.

    Time-outs, connections that were refused, reset or closed in the middle, and unreachable networks heal, and
    so does a name server that has no answer at the moment. A name that does not exist, a certificate that is
    refused and a lack of file descriptors do not.
    """
    if isinstance(error, TimeoutError | ConnectionError | EOFError):
        return True
    if isinstance(error, OSError):
        # getaddrinfo's errors have numbers of their own; this one is "temporary failure in name resolution".
        if type(error).__name__ == "gaierror":
            return "EAI_AGAIN" in _address_error_names(error.errno)
        return error.errno in _HEALING_ERRNOS
    return False


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Give the seconds that a ``Retry-After`` header asks for, 0 or more; None when it says nothing legal.

    Both forms of RFC 9110 section 10.2.3: a number of seconds, and a date in any of the three formats.

    Args:
        value: the header, None when there is none.
        now: the wall clock's time, seconds since the epoch in UTC.
    """
    if value is None:
        return None
    value = value.strip()
    if _DELAY_SECONDS.fullmatch(value):
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)  # an HTTP date is UTC, also in the form that does not say so
    try:
        return max(0.0, moment.timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _address_error_names(number: int | None) -> set[str]:
    # The values of glibc, musl and the BSDs (macOS among them); this module may not import socket.
    return {-3: {"EAI_AGAIN"}, 2: {"EAI_AGAIN"}}.get(number if number is not None else 0, set())


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
