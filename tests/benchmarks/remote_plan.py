"""The measurements over a store, and the bound of each figure. Pure data: nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import ASYNC, FACADE, Job

TORCH_BLOCKING = "torch, blocking client"
TORCH_ASYNCIO = "torch, asyncio in __getitems__"
WEBDATASET = "webdataset over tar, torch"
SPDL = "spdl async, 256 in flight"
NODES = "torchdata nodes, 256 threads"
GRAIN = "grain, 64 threads a worker"
PEERS = (TORCH_ASYNCIO, WEBDATASET, SPDL, NODES, GRAIN)
"""Beside torch with a blocking client, which is every ratio's baseline."""

BARE = {256: "one bare aiohttp loop, 256 in flight", 512: "one bare aiohttp loop, 512 in flight"}
"""No loader: the rate of a client in one process, without batches."""

OURS_TAR = f"{ASYNC}, RemoteIterableDataset over tar"
OURS = (ASYNC, FACADE, OURS_TAR)

WORKERS = 2
BATCH = 32
IN_FLIGHT = 512
"""Of ours: 256, the default, in each worker."""

OBJECTS_KIND = "objects"
TAR_KINDS = {"large": "64 KB", "small": "4 KB"}

LATENCIES = (1, 10, 50, 150)
"""Milliseconds until the first byte of an answer."""

MAIN = 50
"""The latency at which every loader is measured."""

FEW = (TORCH_BLOCKING, SPDL, NODES, GRAIN, BARE[512], ASYNC, FACADE)
"""The loaders that are measured at the other latencies."""

TAR_LATENCIES = (1, 50)

PEER_RATIO = 1.5
"""Least ratio to the best peer."""

TORCH_RATIO = 100.0
"""Least ratio to torch with a blocking client, at 50 ms."""

LIMIT_SHARE = 0.9
"""Least share of what concurrency, latency and a bare client allow."""

TAR_RATIO = 3.0
"""Least ratio to webdataset with torch's loader."""

CPU_RATIO = 1.3
"""Most CPU time an object, against the bare client's."""


@dataclass(frozen=True)
class Row:
    """One measurement's place in the tables.

    Args:
        kind: "objects", or the folder of tar files.
        latency: milliseconds.
        loader: a name from above.
    """

    kind: str
    latency: int
    loader: str

    @property
    def metric(self) -> str:
        """Key of its rate, in samples per second, in the results."""
        return f"{self.kind}/{self.latency}/rate"

    @property
    def cpu(self) -> str:
        """Key of its CPU seconds per sample."""
        return f"{self.kind}/{self.latency}/cpu"

    def job(self, store: str, seconds: float) -> Job:
        """The job that measures it, against the store at this URL."""
        return Job("remote", self.kind, self.loader, seconds=seconds, store=f"{store}/{self.latency}")


def rows(latencies: tuple[int, ...] = LATENCIES) -> list[Row]:
    """All measurements of one round, those that are compared next to each other."""
    planned: list[Row] = []
    for latency in latencies:
        loaders = (TORCH_BLOCKING, *PEERS, *BARE.values(), *OURS) if latency == MAIN else FEW
        planned += [Row(OBJECTS_KIND, latency, loader) for loader in loaders]
    for latency in (each for each in TAR_LATENCIES if each in latencies):
        for kind in TAR_KINDS:
            planned += [Row(kind, latency, loader) for loader in (WEBDATASET, OURS_TAR)]
    return planned
