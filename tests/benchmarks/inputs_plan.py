"""The measurements on inputs as people have them: which loaders read which input. Pure data: nothing heavy is imported.

Data path: [rows] -> jobs -> child processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan import OURS, TORCH

BARE = "bare code on every core"
"""No loader: a process for each worker does the work of a sample, makes no batch and moves nothing."""
DECODING = "the same, decoding alone"
REFERENCE = "reference"
"""No loader either: its checksum is what every loader must reach."""
STATEFUL, NODES, GRAIN, THREADS = "torchdata StatefulDataLoader", "torchdata nodes", "grain", "spdl threads"
SPDL_ASYNC = "spdl async"
PEERS = (STATEFUL, NODES, GRAIN, THREADS, SPDL_ASYNC)
LIMITS = (BARE, DECODING)

WORKERS = 2
LATENCY = 20
"""Milliseconds until the first byte of an answer of the store that has the shards."""


@dataclass(frozen=True)
class Row:
    """One input, and who reads it.

    Args:
        title: its name in the table.
        samples: in an epoch.
        quick: the same with `--quick`.
        peers: that are measured beside torch and ours.
        limits: bare code that is measured; the first gives the limit that shares are of.
        stream: read as a stream: workers decide on the order.
    """

    title: str
    samples: int
    quick: int
    peers: tuple[str, ...]
    limits: tuple[str, ...] = (BARE,)
    stream: bool = False

    @property
    def loaders(self) -> tuple[str, ...]:
        """Torch first: its time is the length of the others' training step."""
        return (TORCH, *OURS, *self.peers)


MAPPED = (STATEFUL, NODES, GRAIN, THREADS)
ROWS = {
    "images": Row(
        "JPEG files, 500 x 375 on average: decode, random resized crop to 224, flip, normalize; batches of 32",
        512,
        64,
        MAPPED,
        (BARE, DECODING),
    ),
    "tokens2k": Row("16 random windows of 2,048 tokens and their targets, a memory-mapped file", 3200, 64, MAPPED),
    "tokens32k": Row("4 random windows of 32,768 tokens and their targets, a memory-mapped file", 600, 16, MAPPED),
    "lengths": Row("32 sequences of 16 to 2,048 tokens, batched by length and padded", 9600, 640, MAPPED),
    "table": Row(
        "Parquet, 100 numbers and 10 categories a row; row by row, batches of 1,024",
        131072,
        8192,
        (STATEFUL,),
        stream=True,
    ),
    "columns": Row(
        "the same file, whole batches out of record batches", 262144, 8192, (STATEFUL, NODES, THREADS), stream=True
    ),
    "shards": Row(
        f"tar shards of JPEG and JSON from a store at {LATENCY} ms, images as above",
        768,
        64,
        (SPDL_ASYNC,),
        stream=True,
    ),
}
