"""Holds the view of a loader: opens it once, whichever threads ask for it at the same time, and ends it.

Data path: loader -> [loader_dashboard] -> dashboard, which is imported when the first view is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncloader.process_hooks import in_forked_child
from asyncloader.workers.memory.live_objects import LiveObjects

if TYPE_CHECKING:
    from asyncloader.live.dashboard import Dashboard
    from asyncloader.live.snapshot import Reading
    from asyncloader.telemetry.statistics import Statistics


class LoaderDashboard:
    """The view of one loader, if it has been opened."""

    def __init__(self) -> None:
        self._dashboard: Dashboard | None = None
        self._ended = False
        self._lock = threading.Lock()

    def open(self, loader: Any, read: Callable[[Any], Reading], statistics: Statistics, port: int) -> Dashboard | None:
        """Return the view, with its page. None: the loader was closed meanwhile.

        Args:
            loader: as of `Dashboard`.
            read: as of `Dashboard`.
            statistics: as of `Dashboard`.
            port: of the page; 0: any.

        Raises:
            OSError: as `Dashboard.serve_page`.
        """
        from asyncloader.live.dashboard import Dashboard

        with self._exclusive():
            dashboard = self._dashboard
            if dashboard is None or not dashboard.open:
                self._dashboard = dashboard = Dashboard(loader, read, statistics)
            # Behind the assignment: `end` either sets this before, or finds the view.
            if self._ended:
                dashboard.close()
                return None
            dashboard.serve_page(port)
        return dashboard

    def watch(self, loader: Any, read: Callable[[Any], Reading], statistics: Statistics) -> None:
        """Open the socket, unless it is open or the loader was closed."""
        if self._dashboard is not None or self._ended:
            return
        from asyncloader.live.dashboard import watch

        with self._exclusive():
            if self._dashboard is None:
                self._dashboard = watch(loader, read, statistics)
            if self._ended and self._dashboard is not None:
                self._dashboard.close()

    def end(self) -> Dashboard | None:
        """Let no view be opened any more. Returns the one that is to be closed, if it exists. Does not wait."""
        self._ended = True
        return self._dashboard

    def _exclusive(self) -> threading.Lock:
        # Before the lock is taken: a child that another thread forks from now on gets a lock that is free.
        in_forked_child(_renew_locks)
        _held.add(self)
        return self._lock


_held: LiveObjects[LoaderDashboard] = LiveObjects()


def _renew_locks() -> None:
    for held in _held:
        held._lock = threading.Lock()
