"""The index of a folder that LitData's `optimize` writes: its chunks, and the samples in each. Pure.

``index.json`` has the chunks (``filename``, ``chunk_bytes``, ``chunk_size``: the number of items, ``dim``: of tokens)
and a ``config`` of all chunks: the types of values, the compression, and the `item_loader` that wrote them. A chunk has
one sample per item; of tokens it has as many samples as whole blocks of tokens fit into it.

It may come from anywhere, so nothing in it is trusted: a file name must not lead out of the folder, and numbers must be
possible.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from asyncloader.errors import ShardError

MAX_INDEX_BYTES = 256 << 20  # a million chunks

_ITEMS, _TOKENS = "PyTreeLoader", "TokensLoader"

_MOST = 1 << 40  # samples of a chunk, so that those of a million chunks can be added up


class ChunkTable(NamedTuple):
    """The chunks of a folder.

    Attributes:
        names: of the files, in order.
        least_bytes: of each file, at least, so that it may have its samples: some versions leave out the table at its
            beginning. int64.
        starts: the number of each chunk's first sample and, last, of all samples: int64.
        block_size: tokens of a sample; None: a sample is an item.
    """

    names: list[str]
    least_bytes: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    block_size: int | None


def parse_index(data: bytes, block_size: int | None, url: str) -> ChunkTable:
    """Return the chunks of a folder.

    Args:
        data: the whole file; the caller bounds its size.
        block_size: tokens of a sample, at least 1, for a folder of tokens; None for all others.
        url: the index's name, for errors.

    Raises:
        ValueError: a `block_size` without tokens, or tokens without one.
        ShardError: this is no such index, it contradicts itself, or its chunks are in a form that cannot be read where
            they lie: encrypted, or compressed as whole files.
    """
    try:
        index: Any = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ShardError(f"the index is no JSON: {error}", url=url) from error
    try:
        config, chunks = _member(index, "config", dict), _member(index, "chunks", list)
        if not chunks:
            raise ValueError("it has no chunk")
        names = [_name(chunk) for chunk in chunks]
        least = [_number(chunk, "chunk_bytes", 1 << 62) for chunk in chunks]
        counts = [_number(chunk, "chunk_size", _MOST) for chunk in chunks]
        loader = config.get("item_loader", _ITEMS)  # the first versions have one kind of item
        tokens = [_number(chunk, "dim", _MOST) for chunk in chunks] if loader == _TOKENS else None
    except ValueError as error:
        raise ShardError(f"this is no index of LitData that can be used: {error}", url=url) from None
    _check_form(config, loader, names, url)
    if (block_size is None) is not (tokens is None):
        raise ValueError(
            f"{url} is of tokens, whose samples are blocks: give block_size="
            if tokens is not None
            else f"block_size={block_size} is for a folder of tokens, and {url} is of {loader}"
        )
    if not config.get("compression"):
        # Before anything is allocated for the number of samples: the table has a number of 4 bytes for each item.
        least = list(map(max, least, [4 * count for count in counts] if tokens is None else tokens))
    if tokens is not None:
        counts = [count // cast("int", block_size) for count in tokens]
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return ChunkTable(names, np.array(least, np.int64), starts, block_size)


def _check_form(config: dict[str, Any], loader: Any, names: list[str], url: str) -> None:
    why = None
    if loader not in (_ITEMS, _TOKENS):
        why = f"its items are of {str(loader)[:80]!r}; those of {_ITEMS} and {_TOKENS} can be read"
    elif config.get("encryption") is not None:
        why = "it is encrypted"
    elif config.get("compression") and not config.get("compression_level"):
        why = (
            "its chunks are compressed as whole files, which LitData replaces by decompressed files as it reads them. "
            'Write it with compression_level="batch", or without compression'
        )
    if why is not None:
        raise ShardError(f"the folder cannot be read in place: {why}", url=url)
    if len(set(names)) != len(names):
        raise ShardError("the index has a chunk twice", url=url)


def _name(chunk: Any) -> str:
    name: str = _member(chunk, "filename", str)
    if not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"{name[:80]!r} is no name of a file in its folder")
    return name


def _number(chunk: Any, name: str, limit: int) -> int:
    number: int = _member(chunk, name, int)
    if not 0 <= number < limit:
        raise ValueError(f"{name!r} is {number}, not in [0, {limit})")
    return number


def _member(value: Any, name: str, kind: type) -> Any:
    found = value.get(name) if type(value) is dict else None
    if type(found) is not kind:
        raise ValueError(f"{name!r} is missing, or no {kind.__name__}")
    return found
