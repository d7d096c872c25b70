"""The form `unzip`: a datapipe for each place of the sequences that another one gives.

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
        sequence_length: their length.
        buffer_size: how far one of the datapipes may be ahead of another; default 1000; -1: without a limit.
        columns_to_skip: places for which there is none; default None: each has one.

    Raises:
        RuntimeError: all places are left out.
        BufferError: when read: one is further ahead.
    """
    places = [place for place in range(sequence_length) if place not in set(columns_to_skip or ())]
    if not places:
        raise RuntimeError(
            "All instances are being filtered out in UnZipperIterDataPipe. Please check"
            "the input `sequence_length` and `columns_to_skip`."
        )
    readers = source_datapipe.fork(len(places), buffer_size)
    return [reader.map(itemgetter(place)) for reader, place in zip(readers, places, strict=True)]
