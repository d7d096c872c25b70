from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports import open_transport
from asyncloader.transports.retry import (
    Attempts,
    RetryPolicy,
    asked_delay,
)

seconds = st.floats(0.001, 1000.0)
jitters = st.floats(0.0, 1.0, exclude_max=True)


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    first = draw(seconds)
    return RetryPolicy(
        budget_s=draw(st.just(0.0) | seconds), first_delay_s=first, cap_s=first * draw(st.floats(1, 100))
    )


# ---------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"budget_s": -1}, "budget_s must be 0 or more seconds, got -1"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"budget_s": float("inf")}, "budget_s"),
        ({"first_delay_s": 0}, "first_delay_s must be above 0"),
        ({"first_delay_s": float("nan")}, "first_delay_s"),
        ({"first_delay_s": 2, "cap_s": 1}, "cap_s must be at least first_delay_s=2"),
        ({"statuses": {200}}, "statuses must be HTTP errors, 400 to 599; got 200"),
    ],
)
def test_policy_refuses_what_makes_no_sense(options: dict[str, float], match: str) -> None:
    """A value out of its bounds is an error that names it."""
    with pytest.raises(ValueError, match=match):
        RetryPolicy(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ["http://host/", "s3://bucket/", "hf://datasets/owner/name"])
@pytest.mark.parametrize("retry", [5, 0, False, "5", {"budget_s": 5}])
def test_an_option_that_is_no_policy(root: str, retry: Any) -> None:
    """It is refused when the transport is made, in the words of the option."""
    with pytest.raises(TypeError, match=r"retry=.* is no RetryPolicy: give RetryPolicy\(budget_s=seconds\), or None"):
        open_transport(root, retry=retry)


def test_delays_double_up_to_the_cap() -> None:
    """At the largest jitter the waits are 1, 2, 4, 5, 5 for a first wait of 1 and a cap of 5."""
    policy = RetryPolicy(first_delay_s=1, cap_s=5)
    assert [policy.delay(failures, 1.0) for failures in range(1, 6)] == [1, 2, 4, 5, 5]


# -------------------------------------------------------------------------------------------------- the attempts


@given(policies(), st.lists(st.tuples(seconds, jitters), max_size=50))
def test_nothing_is_begun_after_the_budget(policy: RetryPolicy, each: list[tuple[float, float]]) -> None:
    """Whatever time the attempts take, no wait leads past the budget, and a failure after it gives up.

    An attempt uses up at most half of the budget.
    """
    draws = iter([jitter for _, jitter in each])
    attempts = Attempts(policy, began=100.0, jitter=lambda: next(draws))
    now, left = 100.0, policy.budget_s
    for taken, _ in each:
        now += taken
        left -= min(taken, policy.budget_s / 2)
        verdict = attempts.failed(now)
        if verdict.delay is None:
            assert left <= 1e-9 * now
            assert verdict.reason
            break
        assert not verdict.reason
        now += verdict.delay
        left -= verdict.delay
        assert left >= -1e-9 * now


@given(policies(), seconds, seconds)
def test_one_long_attempt_is_followed_by_another(policy: RetryPolicy, more: float, taken: float) -> None:
    """The process may have stood still during the attempt: suspended, or with a blocked loop."""
    attempts = Attempts(policy, began=0.0, jitter=lambda: 0.5)
    delay = attempts.failed(policy.budget_s + more).delay
    if not policy.budget_s:
        assert delay is None
        return
    assert delay is not None
    assert attempts.failed(policy.budget_s + more + delay + policy.budget_s + taken).delay is None
    itself = Attempts(policy, began=0.0, share=1.0)
    assert itself.failed(policy.budget_s + more).delay is None


@given(policies(), seconds, st.floats(0, 2000.0), jitters)
def test_retry_after_is_kept_or_given_up(policy: RetryPolicy, taken: float, asked: float, jitter: float) -> None:
    """The operation waits at least as long as the server asks, or ends."""
    verdict = Attempts(policy, began=0.0, jitter=lambda: jitter).failed(taken, retry_after=asked)
    left = policy.budget_s - min(taken, policy.budget_s / 2)
    if not policy.budget_s or asked > left + 1e-9:
        assert verdict.delay is None
    elif asked < left - 1e-9:
        assert verdict.delay is not None
        assert asked <= verdict.delay <= left + 1e-9


def test_those_that_were_turned_away_together_come_back_apart() -> None:
    """The server named the same time to all clients: the jitter is added to it."""
    policy = RetryPolicy(budget_s=100, first_delay_s=4)
    waits = [Attempts(policy, 0.0, lambda: jitter).failed(1.0, retry_after=10).delay for jitter in (0.0, 0.5, 1.0)]  # noqa: B023
    assert waits == [10.0, 12.0, 14.0]


def test_reasons_say_what_ended_it() -> None:
    """The clause for the error's text names the budget, or the wait that the server asked for."""
    assert Attempts(RetryPolicy(budget_s=0), 0.0).failed(1.0).reason == "retries are off"
    attempts = Attempts(RetryPolicy(budget_s=5), 0.0, jitter=lambda: 0.0)
    assert not attempts.failed(2.5).reason
    assert attempts.failed(5.0).reason == "no progress for 5 s, the retry budget"
    reason = Attempts(RetryPolicy(budget_s=5), 0.0).failed(2.0, retry_after=60).reason
    assert reason == "the server asks to wait 60 s, and 3.0 s of the 5 s budget are left"


def test_progress_starts_the_budget_and_the_back_off_again() -> None:
    """A long download that breaks now and then continues for any length of time."""
    attempts = Attempts(RetryPolicy(budget_s=10, first_delay_s=1), 0.0, jitter=lambda: 1.0)
    for hour in range(5):
        assert attempts.failed(hour * 3600.0 + 1).delay == 1
        assert attempts.failed(hour * 3600.0 + 3).delay == 2
        attempts.progressed(hour * 3600.0 + 3600)
    assert attempts.failures == 10


def test_a_pause_uses_nothing_up() -> None:
    """Time in which no bytes were requested does not use up the budget; a negative pause counts as none."""
    attempts = Attempts(RetryPolicy(budget_s=10), 0.0, jitter=lambda: 0.0)
    attempts.paused(1000.0)
    attempts.paused(-50.0)
    assert attempts.failed(1005.0).delay is not None
    assert attempts.failed(1009.0).delay is not None
    assert attempts.failed(1010.0).delay is None


def test_own_jitter_leaves_the_global_generator_alone() -> None:
    """A retry draws nothing from the generator that datasets use, so it never changes a sample."""
    state = random.getstate()
    delays = {Attempts(RetryPolicy(), 0.0).failed(1.0).delay for _ in range(20)}
    assert len(delays) > 10
    assert random.getstate() == state


# --------------------------------------------------------------------------------------------------- Retry-After


@given(st.text() | st.sampled_from(["-1", "1.5", "1e3", "nan", "9" * 20, "Sun, 06 Nov 1994 08:49:37 GMT"]))
def test_retry_after_of_a_hostile_server(text: str) -> None:
    """What is no number of seconds counts as missing."""
    assert (asked_delay({"Retry-After": text}) is not None) == bool(re.fullmatch("[0-9]{1,12}", text.strip()))
    assert asked_delay({"Retry-After": " 7"}) == 7
    assert asked_delay({}) is None
