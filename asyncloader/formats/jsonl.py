r"""Reads and writes JSON lines: one object per line is one sample, its members are the fields. Pure.

Data path: transport -> chunks -> [jsonl] -> samples; samples -> [jsonl: `JsonlEncoder`] -> parts -> shard.

Encoding is UTF-8 (RFC 8259), lines end with ``\n`` or ``\r\n``; blank lines and a byte order mark at the beginning are
skipped. The last line needs no line end. Format: https://jsonlines.org.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncloader.formats.base import (
    MAX_SAMPLE_BYTES,
    OnBad,
    Reader,
    ReadWhole,
    Sample,
    SampleSlices,
    base_name,
)
from asyncloader.formats.encoder import RESERVED, BadSample, RecordEncoder, check_keys, dump_json

BOM = b"\xef\xbb\xbf"
_BLANKS = " \t\r\n"  # of JSON
_decode_json = json.JSONDecoder().raw_decode


class JsonlReader(Reader):
    """Reads JSON lines. Fields are parsed values under their own names; the key is the shard's name and the offset.

    Bad lines that `on_bad` can skip: not JSON, not an object, not UTF-8, or nested too deeply. A line longer than
    `max_sample_bytes` is an error, raised before more of it is held in memory. Members named ``__key__`` and
    ``__url__`` are overwritten.

    A shard can be cut at any byte (`cut_shard`): a line belongs to the part that contains its first byte.

    Args, besides those of `base.Reader`:
        sync: `start` may lie inside a line, which belongs to the previous part; the reader is then fed from the byte
            before `start`, to find out whether a line ends there.
    """

    def __init__(
        self,
        url: str,
        *,
        start: int = 0,
        stop: int | None = None,
        sync: bool = False,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        on_bad: OnBad | None = None,
    ) -> None:
        super().__init__(url, start=start, stop=stop, max_sample_bytes=max_sample_bytes, on_bad=on_bad)
        self._feed_from = start - 1 if sync and start > 0 else start
        self._seeking = self._feed_from < start
        self._at = self._feed_from  # offset of the first byte of the current line

    @property
    def feed_from(self) -> int:
        """The offset of the first byte to feed. See `ShardReader.feed_from`."""
        return self._feed_from

    def _take(self, chunk: bytes) -> None:
        # Drop the end of the line that belongs to the previous part.
        if self._seeking:
            end = chunk.find(b"\n") + 1
            self._at += end or len(chunk)
            # A long line may end after this part: the bytes up to its end need not be read.
            if self._is_past() or not end:
                return
            self._seeking = False
            chunk = chunk[end:]
        lines = chunk.split(b"\n")
        last = lines.pop()
        for line in lines:
            whole = line
            if self._held:
                self._held += line
                whole = bytes(self._held)
                self._held.clear()
            self._read(whole, self._at + len(whole) + 1)
            if self._is_past():
                return
        # Before the bytes are kept: a shard without line ends must not fill the memory.
        self._check_size(len(self._held) + len(last), self._at)
        self._held += last

    def _finish(self) -> None:
        if self._held:
            self._read(bytes(self._held), self._at + len(self._held))

    def _is_past(self) -> bool:
        self._done = not self._left or (self._stop is not None and self._at >= self._stop)
        return self._done

    def _read(self, line: bytes, resume: int) -> None:
        """Parse the line at `_at`, and advance."""
        at = self._at
        self._check_size(len(line), at)
        if not at and line.startswith(BOM):
            line = line[len(BOM) :]
        if line and not line.isspace():
            if self._skip:
                self._skip -= 1
                self._at = resume
                return
            try:
                value: Any = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                self._bad(f"a line that is no JSON: {error}", at, resume, error)
            else:
                if type(value) is dict:
                    self._give(value, at, resume)
                else:
                    self._bad(f"a line that is a JSON {type(value).__name__}; a sample is an object", at, resume)
        self._at = resume


def json_lines(url: str) -> ReadWhole:
    """Return the function that reads samples like a `JsonlReader`: lines with their ends, and no blank line before."""
    name = base_name(url)

    def read(source: SampleSlices, at: int, end: int, start: int) -> Sample | None:
        line = source[at:end]
        if line.find(b"\n") != len(line) - 1:
            return None
        try:
            # As `json.loads`, but for blanks at the beginning.
            text = line.decode()
            fields, stop = _decode_json(text)
        except (ValueError, RecursionError):  # a byte order mark at the shard's start, too
            return None
        if type(fields) is not dict or (stop != len(text) - 1 and text[stop:].strip(_BLANKS)):
            return None
        fields["__key__"] = f"{name}:{start}"
        fields["__url__"] = url
        return fields

    return read


class JsonlEncoder(RecordEncoder):
    """Encodes each sample as a line of UTF-8: what `json.dumps` takes, without NaN and infinity, which are no JSON, and
    without keys that are the same in JSON.
    """

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's line, like `RecordEncoder.encode_sample`."""
        fields = {name: value for name, value in sample.items() if name not in RESERVED}
        try:
            text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            check_keys(fields)
        except (TypeError, ValueError, RecursionError) as error:
            for name, value in fields.items():
                dump_json(name, value, allow_nan=False)
            raise BadSample(f"it cannot be JSON: {error}") from None
        try:
            return [text.encode() + b"\n"]
        except UnicodeEncodeError:  # half a character, which JSON can hold escaped
            return [json.dumps(fields, separators=(",", ":")).encode() + b"\n"]
