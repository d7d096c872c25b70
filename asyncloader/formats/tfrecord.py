"""TFRecord shards: a sample a record, raw or as the tf.train.Example in it. Pure, sans I/O.

Data path: transport -> chunks -> [tfrecord] -> samples.

A record is its length (8 bytes, little-endian), the length's masked CRC-32C (4), the data, and the data's masked
CRC-32C (4). Source: TensorFlow's `tfrecord` tutorial and the comment in `record_writer.h`. There is no mark between
records, so a shard cannot be cut without an index of it.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import unpack
from typing import Literal

from asyncloader.formats.base import MAX_SAMPLE_BYTES, OnBad, Sample
from asyncloader.formats.crc32c import crc32c, fast_crc32c, masked
from asyncloader.formats.example import parse_example
from asyncloader.formats.push import Parser, PushReader

__all__ = ["TFRecordReader"]


class TFRecordReader(PushReader):
    """Reads TFRecords. The key of a sample is the shard's name and the record's offset.

    The checksum of each length is always verified, before the length is believed. Records that `on_bad` can have
    stepped over: a wrong checksum of the data, no tf.train.Example.

    Args:
        url: see `push.Reader`, as for `start`, `stop`, `max_sample_bytes` and `on_bad`.
        start: see there.
        stop: see there.
        example: read each record as a tf.train.Example, whose features are the fields (`example.parse_example`). Else
            the one field is ``record``, the raw bytes.
        checksum: verifies the data by this CRC-32C. ``"auto"``: by google_crc32c where it is installed, otherwise **not
            at all**, because Python alone would take 100 times as long as the rest. None: not at all.
        max_sample_bytes: see there.
        on_bad: see there.
    """

    def __init__(
        self,
        url: str,
        *,
        start: int = 0,
        stop: int | None = None,
        example: bool = False,
        checksum: Callable[[bytes], int] | Literal["auto"] | None = "auto",
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        on_bad: OnBad | None = None,
    ) -> None:
        super().__init__(url, start=start, stop=stop, max_sample_bytes=max_sample_bytes, on_bad=on_bad)
        self._example = example
        self._checksum = fast_crc32c() if checksum == "auto" else checksum

    @property
    def verifies_data(self) -> bool:
        """The checksums of the data are verified, not only those of the lengths."""
        return self._checksum is not None

    def _parse(self) -> Parser:
        while self._stop is None or self._at < self._stop:
            at = self._at
            self._may_end = True
            head = yield 12
            self._may_end = False
            length, told = unpack("<QI", head)
            if told != masked(crc32c(head[:8])):
                self._fail("not a TFRecord: the checksum of its length is wrong", at)
            self._check_size(length, at)
            data = yield length
            (told,) = unpack("<I", (yield 4))
            if self._checksum is not None and told != masked(self._checksum(data)):
                self._bad("a damaged TFRecord: the checksum of its data is wrong", at, self._at)
                continue
            fields: Sample = {"record": data}
            if self._example:
                try:
                    fields = dict(parse_example(data))
                except ValueError as error:
                    self._bad(f"no tf.train.Example: {error}", at, self._at, error)
                    continue
            self._give(fields, at, self._at)
