"""The loop whose clock jumps: timers fire in their order at their times, and waiting for nothing is an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from asyncloader.simulation.virtual_time import Deadlock, run_virtual


def test_hours_pass_at_once() -> None:
    """Each task wakes exactly when it asked to, in the order of the times, whatever they are."""

    async def run() -> list[tuple[float, float]]:
        loop, woken = asyncio.get_running_loop(), list[tuple[float, float]]()

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append((seconds, loop.time()))

        await asyncio.gather(*map(sleep, (3600.0, 1e-6, 0.0, 86_400.0 * 365, 3600.0)))
        return woken

    woken = run_virtual(run())
    assert [wanted for wanted, _ in woken] == [0.0, 1e-6, 3600.0, 3600.0, 86_400.0 * 365]
    assert all(at == pytest.approx(wanted, abs=1e-6) for wanted, at in woken)


def test_waiting_for_nothing() -> None:
    """Raises instead of hanging, and the loop's generators are closed."""
    closed: list[bool] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    async def run() -> None:
        async for _ in numbers():
            await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="all tasks wait"):
        run_virtual(run())
