"""The time of decoding is the sum over all threads; threads share the samples of a batch."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import copy_context

import pytest

from asyncloader.workers.fetch import sample as making
from asyncloader.workers.fetch.sample import Decoder
from asyncloader.workers.fetch.threads import Failure, JobThreads, run_each

CALLS, THREADS = 5000, 4


class Clock(threading.local):
    """Goes on by a second with each look of a thread."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_each_threads_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is lost between threads that end their calls at the same moment, and each is returned once."""
    monkeypatch.setattr(making, "perf_counter", Clock())
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


@pytest.mark.parametrize("until_failure", [True, False])
@pytest.mark.parametrize("most", [0, 1, 3])
async def test_a_failure_ends_decoding_on_request(most: int, until_failure: bool) -> None:
    """All samples before the first failure are decoded; behind it, no sample begins if none is wanted."""
    begun: list[int] = []

    def decode(sample: int) -> int:
        begun.append(sample)
        return 100 // (sample - 50)

    threads = JobThreads(most, "decode") if most else None
    try:
        contexts = [copy_context() for _ in range(500)]
        found = await run_each(threads, decode, contexts, [], until_failure=until_failure)
    finally:
        if threads is not None:
            threads.close()
            threads.join()
    assert found[:50] == [100 // (sample - 50) for sample in range(50)]
    assert isinstance(found[50], Failure)
    assert isinstance(found[50].error, ZeroDivisionError)
    if not until_failure:
        assert found[51:] == [100 // (sample - 50) for sample in range(51, 500)]
    elif most < 2:
        assert begun == list(range(51))
    found.clear()


async def test_a_cancelled_batch_begins_no_more_samples() -> None:
    """The sample that is being decoded is decoded to its end; its thread takes no other."""
    begun: list[int] = []
    entered, leave = threading.Event(), threading.Event()

    def decode(sample: int) -> int:
        begun.append(sample)
        entered.set()
        leave.wait()
        return sample

    threads = JobThreads(1, "decode")
    contexts = [copy_context() for _ in range(5)]
    batch = asyncio.ensure_future(run_each(threads, decode, contexts, [], until_failure=True))
    try:
        await asyncio.to_thread(entered.wait)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
    finally:
        leave.set()
        threads.close()
        threads.join()
    assert begun == [0]
