"""Datasets whose samples wait for one another: an epoch would never end if fewer were in flight than is promised."""

from __future__ import annotations

import asyncio
from typing import Any

from torch.utils.data import Dataset


class Meeting(Dataset[Any]):
    """No sample is done before `together` samples are in flight in its process."""

    def __init__(self, n: int, together: int) -> None:
        self.n = n
        self.together = together
        self.waiting = 0
        self.all_here: asyncio.Event | None = None

    def __len__(self) -> int:
        return self.n

    async def __getitem__(self, index: int) -> int:
        if self.all_here is None:
            self.all_here = asyncio.Event()
        self.waiting += 1
        if self.waiting % self.together == 0:
            event, self.all_here = self.all_here, None
            event.set()
        else:
            await self.all_here.wait()
        return index


class MeetingBatches(Meeting):
    """`Meeting` for whole batches."""

    async def __getitems__(self, indices: list[int]) -> list[int]:
        await Meeting.__getitem__(self, 0)
        return list(indices)
