"""The form `to_iter_datapipe`: reads a map-style datapipe in the order of its indices.

Data path: MapDataPipe -> [convert] -> graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe


class MapToIterConverter(IterDataPipe[Any]):
    """Form ``to_iter_datapipe`` of a `MapDataPipe`.

    Args:
        datapipe: is read by index.
        indices: the indices or keys to read, in this order; default None: 0 to ``len(datapipe) - 1``.

    Raises:
        TypeError: `datapipe` is no `MapDataPipe`.
    """

    def __init__(self, datapipe: MapDataPipe[Any], indices: list[Any] | None = None) -> None:
        if not isinstance(datapipe, MapDataPipe):
            raise TypeError(f"MapToIterConverter can only apply on MapDataPipe, but found {type(datapipe)}")
        self.datapipe: Any = datapipe
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)) if self.indices is None else self.indices:
            yield self.datapipe[index]

    def __len__(self) -> int:
        return len(self.datapipe) if self.indices is None else len(self.indices)
