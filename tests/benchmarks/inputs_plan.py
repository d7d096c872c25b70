"""The measurements on inputs as people have them: which loaders read which input. Pure data: nothing heavy is imported.

Data path: [rows] -> jobs -> child processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan import FACADE, OURS, TORCH

BARE = "bare code on every core"
"""No loader: a process for each worker does the work of a sample, makes no batch and moves nothing."""
DECODING = "the same, decoding alone"
REFERENCE = "reference"
"""No loader either: its checksum is what every loader must reach."""
STATEFUL, NODES, GRAIN, THREADS = "torchdata StatefulDataLoader", "torchdata nodes", "grain", "spdl threads"
SPDL_ASYNC, TURBO = "spdl async", "turboloader MapDataLoader"
MODULES = {
    STATEFUL: "torchdata",
    NODES: "torchdata",
    GRAIN: "grain",
    THREADS: "spdl",
    SPDL_ASYNC: "spdl",
    TURBO: "turboloader",
}
"""Where each peer comes from; one that is not installed is left out of its rows."""
PEERS = tuple(MODULES)
LIMITS = (BARE, DECODING)

STREAMS = 8
ELASTIC, OUR_THREADS = f"{FACADE}, streams={STREAMS}", f"{FACADE}, workers='threads'"
VARIANTS = (ELASTIC, OUR_THREADS)
"""Ours with an option: batches that depend on no number of workers, and threads instead of processes."""

WORKERS = 2
OBJECTS = 32
"""Objects in a batch."""


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
        variants: of ours.
        latency: milliseconds until the first byte of an answer of the store that has the files; 0: no store.
    """

    title: str
    samples: int
    quick: int
    peers: tuple[str, ...]
    limits: tuple[str, ...] = (BARE,)
    stream: bool = False
    variants: tuple[str, ...] = ()
    latency: int = 0

    @property
    def loaders(self) -> tuple[str, ...]:
        """Torch first: its time is the length of the others' training step."""
        return (TORCH, *OURS, *self.variants, *self.peers)


MAPPED = (STATEFUL, NODES, GRAIN, THREADS)
ROWS = {
    "images": Row(
        "JPEG files, 500 x 375 on average: decode, random resized crop to 224, flip, normalize; batches of 32",
        512,
        64,
        (*MAPPED, TURBO),
        (BARE, DECODING),
        variants=(OUR_THREADS,),
    ),
    "tokens2k": Row(
        "16 random windows of 2,048 tokens and their targets, a memory-mapped file",
        3200,
        64,
        (*MAPPED, TURBO),
        variants=(OUR_THREADS,),
    ),
    "tokens32k": Row(
        "4 random windows of 32,768 tokens and their targets, a memory-mapped file",
        600,
        16,
        (*MAPPED, TURBO),
        variants=(OUR_THREADS,),
    ),
    "lengths": Row("32 sequences of 16 to 2,048 tokens, batched by length and padded", 9600, 640, MAPPED),
    "table": Row(
        "Parquet, 100 numbers and 10 categories a row; row by row, batches of 1,024",
        131072,
        8192,
        (STATEFUL,),
        stream=True,
        variants=(ELASTIC,),
    ),
    "lines": Row(
        "JSON lines of texts of 700 characters at the median, cut and padded to 512 bytes; batches of 64",
        65536,
        4096,
        (STATEFUL,),
        stream=True,
        variants=(ELASTIC,),
    ),
    "shards": Row(
        "tar shards of JPEG and JSON from a store at 20 ms, images as above",
        768,
        64,
        (SPDL_ASYNC,),
        stream=True,
        variants=(ELASTIC,),
        latency=20,
    ),
    "objects": Row(
        f"objects of 64 KiB in a store at 50 ms, one for each sample; batches of {OBJECTS}",
        512,
        64,
        (NODES, SPDL_ASYNC),
        latency=50,
    ),
}
