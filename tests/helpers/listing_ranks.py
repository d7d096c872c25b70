"""What a rank of `ranks_script` does for the tests of lists that one rank makes for all."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

import torch

from asyncloader import Mixture, RemoteIterableDataset, RemoteMapDataset
from asyncloader.ranks.one_for_all import OneForAll
from tests.helpers.remote_folders import number_of
from tests.helpers.seeded_datasets import Rows
from tests.helpers.seeded_runs import Stepwise

_distributed: Any = torch.distributed
COPIES = hasattr(_distributed.Store, "clone")
"""Whether this torch's stores can be copied, without which each rank asks for itself."""


class Listing:
    """The functions that a test may call, of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def listed(self, kind: str, url: str, ranks: list[int] | None = None, **dataset: Any) -> list[int] | str | None:
        """Read an epoch of shards in a store, on these ranks, or on all. Returns the samples of this rank, or an error.

        Args:
            kind: "stream", "fixed", "elastic", "mixture" or "map"; "length" makes no loader, and returns a list of it.
            url: of the shards.
            ranks: which read; None: all.
            dataset: its further options.
        """
        if ranks is not None and self.rank not in ranks:
            return None
        made: Any = RemoteMapDataset(url, **dataset) if kind in ("map", "length") else None
        if made is None:
            fixed: dict[str, Any] = (
                {} if kind == "stream" else {"streams": 4, "elastic": "set" if kind == "elastic" else "order"}
            )
            made = RemoteIterableDataset(url, **fixed, **dataset)
        if kind == "mixture":
            made = Mixture([made, Rows(4)], [1, 0])
        try:
            if kind == "length":
                return [len(made)]
            with Stepwise("sync", made, batch_size=1, seed=3, decode=number_of) as run:
                return [number for batch in run.epoch() for number in batch.tolist()]
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def once(self, name: str, makes: dict[int, str], results: int = 1) -> list[Any]:
        """Find out a result that one rank finds out for all. Returns the results, or errors, and the times that this
        rank was asked for it.

        Args:
            name: of the result.
            makes: the ranks that do, and what comes of it on each: "large", "error", "cancelled", "broken" data, or
                another text.
            results: how often the ranks ask.
        """
        asked = 0

        async def make() -> bytes:
            nonlocal asked
            asked += 1
            what = makes[self.rank]
            if what == "error":
                raise ValueError("the store is empty")
            if what == "cancelled":
                raise asyncio.CancelledError
            return random.Random(7).randbytes((3 << 20) + 5) if what == "large" else what.encode()

        def read(data: bytes) -> bytes:
            if data == b"broken":
                raise ValueError("it is none")
            return data

        async def run() -> list[Any]:
            once = OneForAll(name)
            found: list[Any] = []
            for _ in range(results if self.rank in makes or not makes else 0):
                try:
                    data = await once.find(make, bytes, read)
                    found.append(hashlib.sha256(data).hexdigest() if len(data) > 99 else data.decode())
                except asyncio.CancelledError:
                    found.append("cancelled")
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")
            return [*found, asked]

        return asyncio.run(run())

    def lie(self, name: str, header: bytes, pieces: list[bytes]) -> str | None:
        """Read a result that rank 0 has forged. Returns the error of the other rank."""
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store: Any = PrefixStore(f"asyncloader/once/{name}/1/0", _get_default_store())
        if not self.rank:
            store.set("claim", "rank 0")
            for number, piece in enumerate(pieces):
                store.set(str(number), piece)
            store.set("header", header)
        torch.distributed.barrier()
        if not self.rank:
            return None

        async def make() -> bytes:
            return b"own"

        try:
            return str(asyncio.run(OneForAll(name).find(make, bytes, bytes)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
