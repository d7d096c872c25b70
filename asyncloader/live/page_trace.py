"""Makes the trace that a page asks for: the last seconds of the trace that is on, or else the next seconds.

Data path: recording -> [page_trace] -> live_server -> page.

A recording for a page gives way to `loader.trace()`, and ends when no page waits for it.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import sleep
from collections import Counter
from functools import partial

from asyncloader.bridge import in_thread
from asyncloader.telemetry.statistics import Statistics
from asyncloader.tracing.recording import Recording
from asyncloader.tracing.trace_file import pack


class TraceDownload:
    """Makes traces of one loader, in the event loop that serves its page.

    Args:
        statistics: the loader's counters, which have its trace.
        loader: the name of its class.
    """

    def __init__(self, statistics: Statistics, loader: str) -> None:
        # Weakly: the server that has this object must keep nothing of the loader.
        self._statistics = weakref.ref(statistics)
        self._loader = loader
        self._waiting: Counter[Recording] = Counter()  # requests for which each recording goes on
        self._packing = asyncio.Lock()  # one at a time: each takes memory, and CPU time of the training process

    async def take(self, seconds: float) -> bytes:
        """Return a .json.gz file of the last `seconds`; without a trace, of those from now on.

        Raises:
            OSError: the loader was freed.
        """
        statistics = self._statistics()
        if statistics is None:
            raise OSError("the loader was freed")
        recording = self._recording(statistics)
        if recording.file is None:
            self._waiting[recording] += 1
            try:
                await sleep(seconds)
            finally:
                self._waiting[recording] -= 1
                if not self._waiting[recording]:
                    del self._waiting[recording]
                    # Without effect if `loader.trace()` has taken its place.
                    statistics.set_trace(recording, None)
                    recording.end()
        async with self._packing:
            return await in_thread(partial(_pack, recording, seconds))

    def _recording(self, statistics: Statistics) -> Recording:
        """The recording that is on; it is begun if there is none."""
        while True:
            current = statistics.trace
            if current is not None and current.owned:
                return current
            begun = Recording(self._loader, None, statistics.ring_copies)
            # Again if another thread has begun a trace meanwhile.
            if statistics.set_trace(current, begun):
                return begun


def _pack(recording: Recording, seconds: float) -> bytes:
    return pack(recording.events(seconds))
