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
SPDL_ASYNC, SPDL_DECODER = "spdl async", "spdl threads, spdl's decoder"
HUGGING, HUGGING_STREAM = "Hugging Face datasets", "Hugging Face datasets, streaming"
LITDATA, LITDATA_RAW = "LitData StreamingDataLoader", "LitData StreamingRawDataset"
ZEPHON, TURBO = "zephon", "turboloader MapDataLoader"
MODULES = {
    STATEFUL: "torchdata",
    NODES: "torchdata",
    GRAIN: "grain",
    THREADS: "spdl",
    SPDL_ASYNC: "spdl",
    SPDL_DECODER: "spdl",
    HUGGING: "datasets",
    HUGGING_STREAM: "datasets",
    LITDATA: "litdata",
    LITDATA_RAW: "litdata",
    ZEPHON: "zephon",
    TURBO: "turboloader",
}
"""Where each peer comes from; one that is not installed is left out of its rows."""
PEERS = tuple(MODULES)
ANY_ORDER = (LITDATA,)
"""Peers that choose the order of samples themselves, also where the others read given batches."""
LIMITS = (BARE, DECODING)

STREAMS = 8
ELASTIC, OUR_THREADS = f"{FACADE}, streams={STREAMS}", f"{FACADE}, workers='threads'"
VARIANTS = (ELASTIC, OUR_THREADS)
"""Ours with an option: batches that depend on no number of workers, and threads instead of processes."""

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
        variants: of ours.
        needs: modules without which it is not measured.
    """

    title: str
    samples: int
    quick: int
    peers: tuple[str, ...]
    limits: tuple[str, ...] = (BARE,)
    stream: bool = False
    variants: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

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
        (*MAPPED, HUGGING, LITDATA, LITDATA_RAW, TURBO),
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
    "lengths": Row("32 sequences of 16 to 2,048 tokens, batched by length and padded", 9600, 640, (*MAPPED, HUGGING)),
    "videos": Row(
        "4 frames at timestamps of H.264 clips of 320 x 240, a state and 16 actions (LeRobot's samples); batches of 8",
        320,
        16,
        (STATEFUL, NODES, GRAIN, THREADS, SPDL_DECODER, TURBO),
        variants=(OUR_THREADS,),
        needs=("av", "torchcodec"),
    ),
    "table": Row(
        "Parquet, 100 numbers and 10 categories a row; row by row, batches of 1,024",
        131072,
        8192,
        (STATEFUL, HUGGING_STREAM, ZEPHON),
        stream=True,
        variants=(ELASTIC,),
    ),
    "columns": Row(
        "the same file, whole batches out of record batches", 262144, 8192, (STATEFUL, NODES, THREADS), stream=True
    ),
    "lines": Row(
        "JSON lines of texts of 700 characters at the median, cut and padded to 512 bytes; batches of 64",
        65536,
        4096,
        (STATEFUL, HUGGING_STREAM, ZEPHON),
        stream=True,
        variants=(ELASTIC,),
    ),
    "shards": Row(
        f"tar shards of JPEG and JSON from a store at {LATENCY} ms, images as above",
        768,
        64,
        (SPDL_ASYNC,),
        stream=True,
        variants=(ELASTIC,),
    ),
}
