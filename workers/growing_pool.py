"""The pool of a loader whose number of workers changes while an epoch runs.

Data path: scheduler -> [growing_pool] -> worker -> ring -> reorder. See `epoch/worker_count.py`, which changes it.

Workers are added with the next number, and given up from the highest number down. So the numbers have no gaps, and the
lists of the pool stay parallel.
"""

from __future__ import annotations

import threading
from typing import Any

from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.source import WorkerHandle


class GrowingPool(WorkerPool):
    """A pool that workers are added to and taken from. Its arguments are those of `WorkerPool`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._given_up: list[WorkerHandle] = []  # those that `dismiss` will end
        super().__init__(*args, **options)

    def extend(self, process: WorkerHandle) -> bool:
        """Take a process from `make` as one worker more. In the loop's thread, while attached.

        Returns False if its number is not the next one: `discard` it then.

        Raises:
            RingMemoryError: there is no memory for its ring. `discard` it, too.
        """
        workers = len(self.processes)
        if process.worker_id != workers or self._loop is None:
            return False
        ring = self._source.ring_manager(*self._ring_options._replace(workers=workers + 1))
        # `stop`, in another thread, ends the processes of both collections: it must find this one in one of them.
        with self._making:
            if process not in self._spare:
                return False  # `stop` has taken it
            self.processes.append(process)
            self._spare.discard(process)
        self.rings.append(ring)
        self._count_rings()
        self._inboxes.append(self._inbox(process))
        if self._watchdog is not None:
            self._watchdog.add_worker()
        self._listen_to(self._loop, process)
        return True

    def vacant(self, worker: int) -> bool:
        """Whether the worker has ended, and was not replaced yet."""
        return worker in self._vacant

    def shorten(self) -> None:
        """Give up the worker with the highest number, which has no tasks: `dismiss_soon` follows. In the loop's thread,
        while attached.
        """
        process, worker = self.processes[-1], len(self.processes) - 1
        if self._loop is not None:
            process.unlisten(self._loop)
        if self._watchdog is not None:
            self._watchdog.drop_worker()
        # In this order: `stop`, in another thread, must find it in one of the two.
        with self._making:
            self._spare.add(process)
            self._given_up.append(process)
            self.processes.pop()
        self._vacant.discard(worker)
        self._inboxes.pop()
        # Batches that are not delivered yet keep the ring's memory.
        self.rings.pop().close()
        self._count_rings()

    def _count_rings(self) -> None:
        """Tell each ring how many there are: the next time that one grows, it looks whether all of them fit."""
        for ring in self.rings:
            ring.workers = len(self.rings)

    def dismiss(self) -> None:
        """End the workers that were given up. Blocks until they have ended, a few seconds at most; any thread."""
        # `stop` waits for this, and ends those whose turn has not come: it returns when all workers have ended.
        with self._stop_lock:
            with self._making:
                ending = [process for process in self._given_up if process in self._spare]  # else `stop` has taken it
                self._spare.difference_update(ending)
                self._given_up.clear()
            self._source.end([process for process in ending if not process.released])

    def dismiss_soon(self) -> None:
        """Run `dismiss` in a thread of its own."""
        threading.Thread(target=self.dismiss, name="asyncloader-stop", daemon=True).start()
