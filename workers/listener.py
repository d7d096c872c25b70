"""The interface by which a pool notifies its epoch: of answers, errors, ends and deaths.

Data path: worker -> ring -> pool -> [listener] -> pipeline.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncloader.errors import WorkerDied
from asyncloader.workers.fetch.dataset_state import PackedCursor
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.ipc import wire
from asyncloader.workers.memory.ring import Ring
from asyncloader.workers.memory.template import Template


class Answer(NamedTuple):
    """A worker's batch, not decoded yet: in a slot of `ring`, in the one-off segment `fd`, or nowhere (no bytes).

    The receiver must open it (`delivery/opener.py`) or discard it.
    """

    result: wire.Result
    template: Template
    ring: Ring | None
    fd: int | None
    cursor: PackedCursor | None = None
    records: Sequence[SkippedSample] = ()
    """The samples that were dropped or replaced."""
    arrived: float = 0.0
    """When it was received, by `perf_counter`."""
    spans: bytes = b""
    """The spans that the worker sent last, for a trace: of this task, if it asked for them."""

    def discard(self) -> None:
        """Free the memory of a batch that is not wanted."""
        if self.ring is not None:
            self.ring.give_back(self.result.slot)
        if self.fd is not None:
            os.close(self.fd)


class Listener(ABC):
    """Receives a pool's notifications. Called in the loop's thread, never concurrently."""

    @abstractmethod
    def on_started(self, worker: int, error: Any, cursors: Sequence[PackedCursor | None]) -> None:
        """The worker has begun the epoch: with an error as in `on_error`, or None, and the cursors of its copies of the
        dataset, if they are known already.
        """

    @abstractmethod
    def on_answer(self, worker: int, answer: Answer) -> None:
        """The worker made a batch."""

    @abstractmethod
    def on_error(self, worker: int, seq: int, busy: float, error: Any, records: Sequence[SkippedSample]) -> None:
        """A task raised; `error` is an exception, or torch's wrapper of one."""

    @abstractmethod
    def on_exhausted(self, worker: int, seq: int, cursor: PackedCursor | None) -> None:
        """The worker's copy of an iterable dataset, or of several the one that this task is for, is exhausted; `cursor`
        is its final state.
        """

    @abstractmethod
    def on_empty_batch(
        self, worker: int, seq: int, busy: float, cursor: PackedCursor | None, records: Sequence[SkippedSample]
    ) -> None:
        """A task was carried out, but all of its samples were dropped; `cursor` is the state after it."""

    @abstractmethod
    def on_ask(self, worker: int, number: int, batch: int, left: Any) -> None:
        """The worker requests assignment `number`; answer by `WorkerPool.send_assignment`. See `ShardAssigner.ask`."""

    @abstractmethod
    def on_log(self, level: int, text: str, store: str | None, silent: bool) -> None:
        """The worker has a line for the log; of a store, whether that has gone silent, or answers again."""

    @abstractmethod
    def on_death(
        self, worker: int, death: WorkerDied, *, at_work: bool, saved_rng_state: bytes | None, outside: bool, lost: bool
    ) -> None:
        """The worker ended without being asked to; everything that it had sent was reported before.

        `at_work`: its start-up was over. `saved_rng_state`: its RNG state, if it left because it exceeded its memory
        limit. `outside`: see `WorkerProcess.outside`. `lost`: only the connection failed, the worker may be well.
        """

    @abstractmethod
    def on_failure(self, error: Exception) -> None:
        """The pool itself cannot go on (out of descriptors, a broken stream)."""
