"""Keeps the version of each shard that a worker reads: its samples are of one version, over all ranges and errors.

Data path: worker_stream -> reading -> [pins] -> transports.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass

from asyncloader.plain_context import plain_context
from asyncloader.transports import PinnedReader, Transport

MOST_PINS = 256
"""Shards whose versions a worker keeps; it reads its ranges of one shard soon after each other."""


@dataclass(slots=True)
class Pin:
    """The reader of one shard's version."""

    reader: PinnedReader
    open: int = 0  # ranges that are being read
    used: bool = False
    """Samples of this version have been returned, so no other version may be read."""


class Pins:
    """The versions of the shards of which one worker has read samples in an epoch."""

    def __init__(self) -> None:
        self._pins: OrderedDict[str, Pin] = OrderedDict()

    @plain_context
    def hold(self, transport: Transport, path: str, url: str) -> Generator[Pin, None, None]:
        """Return the reader of a shard for the time of a ``with`` block. A version without returned samples is dropped
        at its end, so that the next attempt may read another version.
        """
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
            # A version that is in use is never dropped, whatever the number.
            if len(self._pins) > MOST_PINS and (idle := next((u for u, p in self._pins.items() if not p.open), None)):
                del self._pins[idle]
