"""What copies to the device read from is kept until they are done, by a thread that waits for nothing else.

Data path: delivery -> stage -> [release] -> ring.

The stage's own thread must not wait for a copy while it could begin the next one: the device's copy engine would stand
still between the two. So it hands over each copy's event, with what holds the slot, and hears of the end.

No locks, for the reason given in `stage.py`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any, TypeAlias

from asyncloader.device.accelerator import DoneEvent

__all__ = ["Releaser"]

_Held: TypeAlias = "queue.SimpleQueue[tuple[DoneEvent, Any] | None]"
_Done: TypeAlias = "queue.SimpleQueue[Exception | None]"


class Releaser:
    """Lets go of sources in the order of their copies. One thread uses it. Dropped without `stop` it ends, too."""

    def __init__(self) -> None:
        held: _Held = queue.SimpleQueue()
        self._held = held
        self._done: _Done = queue.SimpleQueue()  # a message for each copy that has ended: None, or its error
        self._count = 0
        weakref.finalize(self, held.put, None).atexit = False
        # A daemon, as the stage's.
        self.thread = threading.Thread(target=_serve, args=(held, self._done), name="asyncloader-release", daemon=True)
        self.thread.start()

    def hold(self, event: DoneEvent, source: Any) -> None:
        """Keep `source` until the event has come."""
        self._count += 1
        self._held.put((event, source))

    def wait(self, most: int) -> None:
        """Until no more than so many are held.

        Raises:
            Exception: what waiting for an event raised: the device has failed.
        """
        while self._count > most:
            error = self._done.get()
            self._count -= 1
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame

    def count(self) -> int:
        """How many are held, as far as is known. Raises as `wait`."""
        while not self._done.empty():
            self.wait(self._count - 1)
        return self._count

    def stop(self) -> None:
        """Nothing more will be held; returns when nothing is. Not in the releaser's own thread. Idempotent."""
        self._held.put(None)
        self.thread.join()


def _serve(held: _Held, done: _Done) -> None:
    while (item := held.get()) is not None:
        event, source = item
        failure: Exception | None = None
        try:
            event.synchronize()
        except Exception as error:
            failure = error.with_traceback(None)
        # Between two copies this thread refers to nothing of them; who hears of the end finds the slot free.
        del item, event, source
        done.put(failure)
        del failure
