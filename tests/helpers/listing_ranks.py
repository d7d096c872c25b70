"""What a rank of `ranks_script` does for the tests of lists that rank 0 makes for all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any
from unittest import mock

from asyncloader import AsyncDataLoader, Mixture, RemoteIterableDataset
from asyncloader.remote import sample_counts
from asyncloader.remote.discovery import find_shards
from tests.helpers.remote_folders import number_of
from tests.helpers.seeded_datasets import Rows
from tests.helpers.seeded_runs import Stepwise


class Listing:
    """The functions that a test may call, of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def listed(
        self, kind: str, url: str | list[str], epochs: int = 1, known: tuple[int, ...] = (), **dataset: Any
    ) -> list[list[int] | str]:
        """Read epochs of shards in a store. Returns the samples of this rank in each, or an error.

        Args:
            kind: "stream", "fixed" or "mixture"; "broken" is a stream of which rank 0 sends a list that is none.
            url: of the shards; or of each rank's.
            epochs: how many.
            known: ranks that list the shards by themselves before.
            dataset: its further options.
        """
        streams = None if kind in ("stream", "broken") else 4
        made: Any = RemoteIterableDataset(url if isinstance(url, str) else url[self.rank], streams=streams, **dataset)
        if self.rank in known:
            with contextlib.suppress(TypeError):  # tar has no length, which the list says
                len(made)
        if kind == "mixture":
            made = Mixture([made, Rows(4)], [1, 0])
        found: list[list[int] | str] = []
        broken = mock.patch.object(sample_counts, "_packed", return_value=b'{"shards": {"urls": [7]}}')
        with contextlib.ExitStack() as stack:
            if kind == "broken":
                stack.enter_context(broken)
            run = stack.enter_context(Stepwise("sync", made, batch_size=1, seed=3, decode=number_of))
            for _ in range(epochs):
                try:
                    found.append([number for batch in run.epoch() for number in batch.tolist()])
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")
        return found

    def listing_ends(self, url: str, victim: int, how: str, **dataset: Any) -> list[Any]:
        """Read two epochs of a stream, of which `victim` ends the first while its listing, or its wait for that of rank
        0, lasts. Returns the outcomes: this rank's samples, "cancelled" or an error.

        Args:
            url: of the shards.
            victim: the rank.
            how: it is "cancelled", or "killed".
            dataset: its further options.
        """
        attempts = 0

        async def find_slowly(*arguments: Any) -> Any:
            nonlocal attempts
            attempts += 1
            if attempts == 1 and how == "killed" and self.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if attempts == 1 and how == "cancelled":
                # Rank 0 itself until it is cancelled; for another rank, until that has left for certain.
                await asyncio.sleep(3600 if self.rank == victim else 0.5)
            return await find_shards(*arguments)

        async def run() -> list[Any]:
            found: list[Any] = []
            made = RemoteIterableDataset(url, **dataset)
            async with AsyncDataLoader[Any](made, batch_size=1, seed=3, decode=number_of) as loader:
                for epoch in range(2):
                    reading = asyncio.ensure_future(_numbers(loader))
                    if epoch == 0 and self.rank == victim:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(asyncio.shield(reading), 0.2)
                        reading.cancel()
                    try:
                        found.append(await reading)
                    except asyncio.CancelledError:
                        found.append("cancelled")
                    except Exception as error:
                        found.append(f"{type(error).__name__}: {error}")
            return found

        with mock.patch("asyncloader.remote.dataset.find_shards", find_slowly):
            return asyncio.run(run())


async def _numbers(loader: AsyncDataLoader[Any]) -> list[int]:
    return [number async for batch in loader for number in batch.tolist()]
