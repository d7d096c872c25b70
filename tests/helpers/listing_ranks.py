"""What a rank of `ranks_script` does for the tests of lists that one rank makes for all."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import signal
from typing import Any

import torch

from asyncloader import Mixture, RemoteIterableDataset, RemoteMapDataset
from asyncloader.ranks import one_for_all
from asyncloader.ranks.one_for_all import OneForAll
from tests.helpers.remote_folders import number_of
from tests.helpers.seeded_datasets import Rows
from tests.helpers.seeded_runs import Stepwise

_distributed: Any = torch.distributed
COPIES = hasattr(_distributed.Store, "clone")
"""Whether this torch's stores can be copied, without which each rank asks for itself."""


class Listing:
    """The functions that a test may call, of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def listed(
        self, kind: str, url: str | list[str], ranks: list[int] | None = None, **dataset: Any
    ) -> list[int] | str | None:
        """Read an epoch of shards in a store, on these ranks, or on all. Returns the samples of this rank, or an error.

        Args:
            kind: "stream", "fixed", "elastic", "mixture" or "map"; "length" makes no loader, and returns a list of it.
            url: of the shards; or of each rank's.
            ranks: which read; None: all.
            dataset: its further options.
        """
        if ranks is not None and self.rank not in ranks:
            return None
        url = url if isinstance(url, str) else url[self.rank]
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

    def once(self, name: str, makes: dict[int, str], results: int = 1, most: int = one_for_all.MOST) -> list[Any]:
        """Find out a result that one rank finds out for all. Returns the results, or errors, and the times that this
        rank was asked for it.

        Args:
            name: of the result.
            makes: the ranks that do, and what comes of it on each: "large", "error", "cancelled", "broken" data, or
                another text.
            results: how often the ranks ask.
            most: bytes of a result, at most.
        """
        asked = 0
        one_for_all.MOST = most

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

        store: Any = PrefixStore(f"asyncloader/once/{name}/1/0/0", _get_default_store())
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

    def lost(self, name: str, victim: int, how: str, claim: bytes = b"", gone: tuple[int, ...] = ()) -> list[Any]:
        """Find out a result that `victim` is to find out for all, and does not, after each other rank has waited longer
        for it than for a rank without signs of life. Returns the result, how often this rank was asked for it, and the
        lines of its log.

        Args:
            name: of the result.
            victim: the rank.
            how: it is "killed", or "stopped" by a signal; or it "works" for so long; or another program's "claim" is
                there, and it has no part.
            claim: that of the other program.
            gone: ranks that have ended before.
        """
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        one_for_all._BEAT_S, one_for_all._LISTEN_S, one_for_all._MOST_PAUSE_S = 0.02, 0.05, 0.02
        one_for_all._SAY_AFTER_S = 0.5
        store: Any = PrefixStore(f"tests/{name}", _get_default_store())
        lines: list[str] = []
        rank = self.rank
        others = [each for each in range(self.world) if each not in (victim, *gone)]
        asked = 0

        class Lines(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())
                if "waits for" in lines[-1]:
                    store.set(f"waited {rank}", "1")

        async def make() -> bytes:
            nonlocal asked
            asked += 1
            if self.rank == victim and asked == 1:
                store.set("claimed", "1")
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    await asyncio.to_thread(store.wait, [f"waited {each}" for each in others])
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            return f"of rank {self.rank}".encode()

        async def run() -> str:
            return (await OneForAll(name).find(make, bytes, bytes)).decode()

        log, handler = logging.getLogger("asyncloader"), Lines(logging.INFO)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            if how == "claim" and self.rank == victim:
                foreign: Any = PrefixStore(f"asyncloader/once/{name}/1/0/0", _get_default_store())
                foreign.set("claim", claim)
                store.set("claimed", "1")
            if self.rank != victim:
                store.wait(["claimed"])
            return [asyncio.run(run()), asked, lines]
        finally:
            log.removeHandler(handler)

    def orders(self, urls: list[str], **dataset: Any) -> list[int]:
        """Return the lengths of datasets, which rank 0 asks for in this order, and the others in the opposite one; each
        is asked twice.
        """
        found = {
            url: [len(made := RemoteMapDataset(url, **dataset)), len(made)] for url in urls[:: -1 if self.rank else 1]
        }
        return [number for url in urls for number in found[url]]

    def epochs(self, url: str, **dataset: Any) -> list[list[int]]:
        """Return this rank's samples of two epochs of one loader."""
        with Stepwise("sync", RemoteIterableDataset(url, **dataset), batch_size=1, seed=3, decode=number_of) as run:
            return [[number for batch in run.epoch() for number in batch.tolist()] for _ in range(2)]

    def initialized_again(self, port: int, asking: list[list[int]]) -> list[str]:
        """Shut torch.distributed down, and initialize it a number of times on one store. Returns the results that this
        rank gets: the time in which each was found out.

        Args:
            port: of the store, on this machine.
            asking: the ranks that ask for a result each time, in this order.
        """
        store: Any = _distributed.TCPStore("127.0.0.1", port, self.world, not self.rank, use_libuv=False)
        found: list[str] = []

        async def find(time: int) -> str:
            async def make() -> bytes:
                return str(time).encode()

            return (await OneForAll("again").find(make, bytes, bytes)).decode()

        def meet(name: str) -> None:
            if store.add(name, 1) == self.world:
                store.set(f"all {name}", "1")
            store.wait([f"all {name}"])

        for time, ranks in enumerate(asking):
            _distributed.destroy_process_group()
            # gloo would take the address of the process group before for that of this one.
            meet(f"left {time}")
            store.delete_key(f"0//cpu//0/{self.rank}")
            meet(f"comes {time}")
            _distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
            for rank in ranks:
                if rank == self.rank:
                    found.append(asyncio.run(find(time)))
                _distributed.barrier()
        return found
