"""Remembers the version of each shard that a worker reads: its samples are of one version, over all ranges and errors.

Data path: worker_stream -> reading -> [pins] -> transports.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncloader.transports import PinnedReader, Transport

MOST_PINS = 256
"""Shards whose versions a worker remembers; its ranges of one shard are read close to each other."""


@dataclass(slots=True)
class Pin:
    """The reader of one shard's version."""

    reader: PinnedReader
    open: int = 0  # ranges that are being read
    used: bool = False
    """Samples of this version have been returned: from then on no other version is read."""


class Pins:
    """The versions of the shards of which one worker has read samples in an epoch."""

    def __init__(self) -> None:
        self._pins: OrderedDict[str, Pin] = OrderedDict()

    @contextmanager
    def reading(self, transport: Transport, path: str, url: str) -> Generator[Pin, None, None]:
        """Give the reader of a shard. A version of which no samples were returned is forgotten in the end."""
        pin = self._pins.get(url)
        if pin is None or pin.reader.transport is not transport:
            pin = self._pins[url] = Pin(transport.pinned(path))
        self._pins.move_to_end(url)
        pin.open += 1
        try:
            yield pin
        finally:
            pin.open -= 1
            if not (pin.open or pin.used) and self._pins.get(url) is pin:
                del self._pins[url]
            if len(self._pins) > MOST_PINS and (idle := next((u for u, p in self._pins.items() if not p.open), None)):
                del self._pins[idle]
