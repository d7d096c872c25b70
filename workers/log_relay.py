"""Sends a worker's log lines to the main process, where the user has set up the log.

Data path: worker: transports -> logging -> [log_relay] -> channel -> inbox -> pipeline -> logging.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections.abc import Callable

from asyncloader.workers.ipc import wire


class _Relay(logging.Handler):
    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():  # the channel is the main thread's
            logging.getLogger().callHandlers(record)
            return
        line = record.levelno, record.getMessage(), getattr(record, "store", None), getattr(record, "silent", False)
        with contextlib.suppress(ConnectionError):  # the main process closed its end
            self._send(wire.pack(wire.LOG, pickle.dumps(line)))


def relay_log(send: Callable[[bytes], None]) -> None:
    """Send the lines that this process logs as `asyncloader` to the main process, in frames given to `send`."""
    log = logging.getLogger("asyncloader")
    # In place of the handlers that a forked worker inherits: the main process's log would get each line twice.
    log.handlers[:], log.propagate = [_Relay(send)], False
