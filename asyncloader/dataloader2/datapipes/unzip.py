"""The form `unzip`: splits a datapipe of sequences into a datapipe for each place in them.

Data path: graph -> [unzip] -> graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any


def unzip(
    source_datapipe: Any, sequence_length: int, buffer_size: int = 1000, columns_to_skip: Sequence[int] | None = None
) -> list[Any]:
    """Form ``unzip``. Makes a datapipe for each place of the sequences.

    Args:
        source_datapipe: gives sequences.
        sequence_length: length of each.
        buffer_size: items by which one datapipe may be ahead of another; default 1000; -1: no limit.
        columns_to_skip: places that get no datapipe; default None: each place gets a datapipe.

    Raises:
        RuntimeError: all places are left out.
        BufferError: when read: a datapipe is further ahead of another.
    """
    places = [place for place in range(sequence_length) if place not in set(columns_to_skip or ())]
    if not places:
        raise RuntimeError(
            "All instances are being filtered out in UnZipperIterDataPipe. Please check"
            "the input `sequence_length` and `columns_to_skip`."
        )
    readers = source_datapipe.fork(len(places), buffer_size)
    return [reader.map(itemgetter(place)) for reader, place in zip(readers, places, strict=True)]
