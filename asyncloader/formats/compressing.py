"""Compresses shards with gzip or zstd. Pure.

Data path: shard -> [compressing] -> object.

The bytes depend on the shard and on the compressing library alone: a gzip header has no time and no name.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

from asyncloader.formats.compressed import ZSTD_MODULES, Compression

ZSTD_LEVEL = 3
"""The zstd tool's own."""


def compressor(compression: Compression) -> Callable[[Sequence[Buffer]], list[Buffer]]:
    """Return the function that compresses a shard. It takes CPU time and releases the GIL: call it in a thread.

    Raises:
        ImportError: no package for zstd is installed.
    """
    return gzip if compression == "gzip" else zstd_compressor()


def gzip(pieces: Sequence[Buffer]) -> list[Buffer]:
    """Compress with gzip, at its usual level 6."""
    member = zlib.compressobj(wbits=31)
    return [*(each for piece in pieces if (each := member.compress(piece))), member.flush()]


def zstd_compressor() -> Callable[[Sequence[Buffer]], list[Buffer]]:
    """Return the function that compresses with the first package for zstd that is installed.

    Raises:
        ImportError: none is installed.
    """
    for name in (*ZSTD_MODULES, "zstandard"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue

        # As a whole: the frame then says its size, which some readers need.
        def compress(pieces: Sequence[Buffer], module: Any = module) -> list[Buffer]:
            data = b"".join(pieces)
            if module.__name__ == "zstandard":
                return [module.ZstdCompressor(level=ZSTD_LEVEL).compress(data)]
            return [module.compress(data, ZSTD_LEVEL)]

        return compress
    raise ImportError("no package that compresses with zstd is installed: pip install 'asyncloader[shards]'")
