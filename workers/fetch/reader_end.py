"""Ends a batch that was read, and the reading of a dataset: its stream, its threads, and what its code has opened.

Data path: none; part of `reader`.
"""

from __future__ import annotations

from typing import Any

from asyncloader.workers.fetch.dataset_state import Bookmark
from asyncloader.workers.fetch.sample import Decoder
from asyncloader.workers.fetch.stream_fetcher import WorkerStreamFetcher
from asyncloader.workers.fetch.threads import JobThreads
from asyncloader.workers.fetch.worker_resource import aclose_idle, any_open, close_idle


class ReaderEnd:
    """The base of `DatasetReader`, which reads: what ends a batch, and what ends the reading."""

    dataset: Any
    _fetcher: Any
    _bookmark: Bookmark
    _threads: JobThreads | None
    _decoder: Decoder | None

    def taken(self) -> None:
        """The consumer has the stream's batch, or an error in its place. See `StreamFetcher.keeps`."""
        if self._fetcher is not None:
            self._fetcher.taken()

    def recount(self, batches: int) -> None:
        """Set the number of batches that were read: the last was interrupted, perhaps after it was counted."""
        self._bookmark.batches = batches

    async def aclose(self) -> None:
        """Stop reading, and `close`. No fetch may be in progress."""
        await self._close_worker_stream()
        await self.aclose_resources()
        self.close()

    async def aclose_resources(self) -> None:
        """Close what the dataset's code has opened by `worker_resource`. No fetch may be in progress."""
        await aclose_idle(getattr(self._fetcher, "dataset_iter", None))

    def close_resources(self) -> None:
        """Close what a blocking dataset's code has opened by `worker_resource`. Nothing may be fetched afterwards."""
        if any_open():
            # A generator may have stopped within the context of such an object. It ends when it is freed.
            self._fetcher = None
            self._bookmark = Bookmark(self.dataset, 0)
            close_idle()

    async def _close_worker_stream(self) -> None:
        if isinstance(self._fetcher, WorkerStreamFetcher):
            await self._fetcher.dataset_iter.aclose()

    def close(self) -> None:
        """Let the threads end, without waiting, and close what the dataset's code has opened. Nothing may be fetched
        afterwards.
        """
        close_idle()
        for threads in (self._threads, None if self._decoder is None else self._decoder.threads):
            if threads is not None:
                threads.close()
