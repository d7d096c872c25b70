"""The time of decoding is the sum over all threads."""

from __future__ import annotations

import sys
import threading

import pytest

from asyncloader.workers.fetch import decoding
from asyncloader.workers.fetch.decoding import Decoder

CALLS, THREADS = 5000, 4


class Clock(threading.local):
    """Goes on by a second with each look of a thread."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_each_threads_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is lost between threads that end their calls at the same moment, and each is returned once."""
    monkeypatch.setattr(decoding, "perf_counter", Clock())
    decoder = Decoder(abs, None)

    def decode() -> None:
        for number in range(CALLS):
            decoder.call(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=decode) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        seconds = 0.0
        while any(thread.is_alive() for thread in threads):
            seconds += decoder.take_seconds()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert seconds + decoder.take_seconds() == CALLS * THREADS
