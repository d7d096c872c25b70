"""An event loop whose time advances when a test says so."""

from __future__ import annotations

import asyncio


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is set by `at` and `jump`."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def at(self, seconds: float) -> None:
        """Let the time reach `seconds` after the beginning; everything due until then happens when it is due."""
        while self.timers and self.timers[0] <= seconds:
            self.jump(self.timers[0])
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """Set the time at once, as if the loop had been held up: everything that became due happens only now."""
        self.now = 1000.0 + seconds
        self.call_soon(self.stop)
        self.run_forever()

    @property
    def timers(self) -> list[float]:
        """The times of the pending timers, in seconds after the beginning."""
        return sorted(handle.when() - 1000.0 for handle in self._scheduled if not handle.cancelled())  # type: ignore[attr-defined]
