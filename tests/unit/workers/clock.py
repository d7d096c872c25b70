"""An event loop whose time goes by when a test says so."""

from __future__ import annotations

import asyncio


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is set by `at` and `jump`."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def at(self, seconds: float) -> None:
        """It becomes so many seconds after the beginning; what is due until then happens when it is due."""
        while self.timers and self.timers[0] <= seconds:
            self.jump(self.timers[0])
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """The loop looks at the clock for the first time since whatever it was then: it was held up."""
        self.now = 1000.0 + seconds
        self.call_soon(self.stop)
        self.run_forever()

    @property
    def timers(self) -> list[float]:
        """When, in seconds after the beginning, timers will go off."""
        return sorted(handle.when() - 1000.0 for handle in self._scheduled if not handle.cancelled())  # type: ignore[attr-defined]
