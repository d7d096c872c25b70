"""Signal handlers are deferred while a worker is made: they run afterwards, and none is lost or forgotten."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncloader.workers import default_signals
from asyncloader.workers.default_signals import handlers_deferred
from tests.helpers.forking import fork

SIGNALS = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def called() -> Generator[list[int]]:
    """The signals that were handled. The handlers raise."""
    numbers: list[int] = []

    def handle(number: int, frame: Any) -> None:
        numbers.append(number)
        raise InterruptedError(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    yield numbers
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    for number, handler in before.items():
        signal.signal(number, handler)


def in_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_handlers_run_at_the_end(called: list[int]) -> None:
    """Each once, all of them although they raise, and the end of the context raises."""

    def come() -> None:
        with handlers_deferred():
            for number in (*SIGNALS, *SIGNALS):
                signal.raise_signal(number)
            assert not called

    with pytest.raises(InterruptedError):
        come()
    assert sorted(called) == sorted(SIGNALS)


def test_an_error_within_the_context(called: list[int]) -> None:
    """It passes through, and the handlers are those of before."""
    with pytest.raises(LookupError), handlers_deferred():
        raise LookupError


def test_a_signal_that_comes_again_later(called: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made may hang: a second Ctrl-C after a second is handled at once."""
    times = iter((0.0, 2.0))
    monkeypatch.setattr(default_signals, "monotonic", lambda: next(times))

    def come_twice() -> None:
        with handlers_deferred():
            signal.raise_signal(SIGNALS[0])
            with pytest.raises(InterruptedError):
                signal.raise_signal(SIGNALS[0])

    with pytest.raises(InterruptedError):
        come_twice()
    assert called == [SIGNALS[0]] * 2


def test_a_child_that_another_thread_forks(called: list[int]) -> None:
    """Its handlers are the program's."""

    def child() -> None:
        with pytest.raises(InterruptedError):
            signal.raise_signal(SIGNALS[0])

    with handlers_deferred():
        in_thread(lambda: fork(child).wait())
    assert not called


def test_in_another_thread(called: list[int]) -> None:
    """Python runs no handlers there, and lets none be set: nothing changes."""
    before = signal.getsignal(SIGNALS[0])

    def run() -> None:
        with handlers_deferred():
            assert signal.getsignal(SIGNALS[0]) is before

    in_thread(run)
