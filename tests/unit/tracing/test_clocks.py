"""The clocks of two machines are joined within the bounds that their messages give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.tracing.clocks import ClockOffset

SECONDS = st.floats(0.0, 10.0)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1))
def test_no_message_comes_before_it_was_sent(ahead: float, delays: list[tuple[float, float, float]]) -> None:
    """The offset is wrong by half of the fastest round trip at most; the error says so."""
    clock, now = ClockOffset(), 1000.0
    for there, work, back in delays:
        clock.there(now, now + there + ahead)
        clock.back(now + there + work + ahead, now + there + work + back)
        now += 20.0
    fastest = min(there for there, _, _ in delays) + min(back for _, _, back in delays)
    assert clock.error <= fastest / 2 + 1e-6
    if clock.seconds:
        assert abs(clock.seconds - ahead) <= clock.error + 1e-6
    else:
        assert abs(ahead) <= fastest + 1e-6


def test_one_clock() -> None:
    """Processes that may have one clock have it; one bound alone is used as it is."""
    clock = ClockOffset()
    assert clock.seconds == 0.0
    clock.back(7.0, 3.0)
    assert clock.seconds == 4.0
    clock.there(1.0, 6.0)
    assert clock.seconds == 4.5
