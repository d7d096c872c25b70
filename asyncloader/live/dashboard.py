"""Opens the view of a loader, and ends it with the loader.

Data path: loader -> [dashboard] -> live_server, in a thread of its own.

The thread and the sockets exist from `open_dashboard` to `Dashboard.close`; without a reader the thread sleeps. It
keeps no loader alive: when a loader is freed, or the process exits, its view ends. A forked child has no view.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
import os
import socket
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from asyncloader.base.bridge import Bridge
from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import in_forked_child
from asyncloader.epoch.sync_inline import close_at_exit
from asyncloader.errors import LoaderClosed
from asyncloader.live.live_server import LiveServer
from asyncloader.live.snapshot import Reading, Snapshots
from asyncloader.telemetry.statistics import Statistics

_log = logging.getLogger("asyncloader")

_PERIOD_S = 1.0


class Dashboard:
    """The view of a loader, as `DataLoader.dashboard` opens it.

    Args:
        loader: the loader, to which it refers weakly.
        read: reads the loader.
        statistics: the loader's counters.

    Raises:
        OSError: the folder of the sockets cannot be used.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Reading], statistics: Statistics) -> None:
        self._owner = os.getpid()
        self._statistics = statistics
        self._server = server = LiveServer(partial(_lines, weakref.ref(loader), read))
        self._bridge = bridge = Bridge()
        # Before the first socket: a fork in another thread from now on closes it in its child.
        in_forked_child(_close_copies)
        _open.add(self)
        bridge.acquire()
        # With the parts, not with this object: if the loader is part of a cycle, both are freed at the same time. It is
        # called once, also if `close` detaches it in another thread at the same time.
        self._finalizer = weakref.finalize(loader, bridge.release_soon, server.close)
        self._finalizer.atexit = False
        close_at_exit(self)
        try:
            if hasattr(socket, "AF_UNIX"):
                bridge.run(server.listen_at_socket())
        except BaseException:
            self.close()
            raise

    def serve_page(self, port: int) -> None:
        """Serve the page, too, unless it is served already. One thread at a time. Raises OSError."""
        if not self._server.url:
            self._bridge.run(self._server.listen_at_port(port))

    @property
    def url(self) -> str:
        """The page's address, with its secret: a user of this machine who has it can read the page."""
        return self._server.url

    @property
    def socket(self) -> str:
        """The path of the Unix socket that `asyncloader top` reads; empty on Windows."""
        return "" if self._server.path is None else str(self._server.path)

    @property
    def open(self) -> bool:
        """Whether it is served, by this process."""
        return self._finalizer.alive and os.getpid() == self._owner

    def close(self) -> None:
        """End the page, the socket and the thread. Idempotent; the loader's `close` calls it."""
        if os.getpid() != self._owner or self._finalizer.detach() is None:
            return
        try:
            with suppress(LoaderClosed):  # the process exits, which has ended the loop
                self._bridge.run(self._server.close())
        finally:  # Ctrl-C
            self._bridge.release()

    def _close_soon(self) -> None:
        """`close` for the process's exit: does not wait."""
        if os.getpid() == self._owner and self._finalizer.detach() is not None:
            self._bridge.release_soon(self._server.close)

    def __str__(self) -> str:
        return self.url or self.socket

    def __repr__(self) -> str:
        return f"<Dashboard at {self}>" if self.open else "<Dashboard, closed>"

    def _repr_html_(self) -> str:
        if not self.open or not self.url:
            return html.escape(repr(self))
        return f'<a href="{self.url}" target="_blank" rel="noopener noreferrer">{self.url}</a>'


async def _lines(loader: weakref.ref[Any], read: Callable[[Any], Reading]) -> AsyncGenerator[bytes]:
    """Make a line each second: a snapshot of the loader, as JSON."""
    snapshots = Snapshots()
    while (line := _line(loader, read, snapshots)) is not None:
        yield line
        await asyncio.sleep(_PERIOD_S)


def _line(loader: weakref.ref[Any], read: Callable[[Any], Reading], snapshots: Snapshots) -> bytes | None:
    # A function, because the reference to the loader must go before the next line.
    this = loader()
    return None if this is None else json.dumps(snapshots.take(read(this))).encode()


def watch(loader: Any, read: Callable[[Any], Reading], statistics: Statistics) -> Dashboard | None:
    """Open the socket of a loader whose process was started with ``ASYNCLOADER_TOP=1``; a failure is logged only."""
    if get_worker_info() is not None:  # a loader in a worker's dataset
        return None
    try:
        return Dashboard(loader, read, statistics)
    except (OSError, RuntimeError) as error:  # RuntimeError: no more threads can be started
        _log.warning("ASYNCLOADER_TOP: %r cannot be watched: %s", loader, error)
        return None


_open: LiveObjects[Dashboard] = LiveObjects()


def _close_copies() -> None:
    """In a forked child: replace the parent's sockets, and a lock that its thread may have held."""
    for dashboard in _open:
        dashboard._statistics.renew_lock()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in dashboard._server.descriptors():
            # Replaced, not closed: the loop's objects, which the child has copies of, know these numbers and may close
            # them at any time.
            with suppress(OSError):
                os.dup2(null, number, inheritable=False)
        os.close(null)
