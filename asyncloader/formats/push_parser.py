"""Base classes of the push parsers: feed chunks of any size, while the parser requests exact numbers of bytes. Pure.

Data path: transport -> chunks -> [push_parser] -> tar, jsonl, tfrecord, mds -> samples.

A parser is a generator that yields the number of bytes that it needs next, and gets these bytes as the value of the
``yield``: it reads like code that reads a file, and is suspended where the bytes end. A negative number skips bytes
without holding them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import NoReturn, TypeAlias

from asyncloader.formats.base import MAX_SAMPLE_BYTES, Located, OnBad, Sample, ShardError, base_name

Parser: TypeAlias = Generator[int, bytes, None]
"""Yields the number of bytes that it needs (negative: to skip), gets them by ``send``, and returns at the shard's end.
"""


class Reader(ABC):
    """Range, limits and errors, common to the readers of all formats. A `ShardReader`.

    Args:
        url: the shard's, for samples and errors.
        start: offset of the first sample wanted: 0, or a `resume` that a reader returned.
        stop: samples that begin at this offset or later are not read. None: all samples are read.
        max_sample_bytes: refuse a sample that takes more bytes in the shard, before memory is allocated for it.
        on_bad: called with each bad sample that can be skipped. None: the first bad sample is raised.

    Raises:
        ValueError: an offset is negative, or `max_sample_bytes` below 1.
    """

    def __init__(
        self,
        url: str,
        *,
        start: int = 0,
        stop: int | None = None,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        on_bad: OnBad | None = None,
    ) -> None:
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError(f"start={start} and stop={stop} are offsets: 0 or more")
        if max_sample_bytes < 1:
            raise ValueError(f"max_sample_bytes is {max_sample_bytes}; it must be at least 1")
        self._url = url
        self._name = base_name(url)
        self._start = start
        self._stop = stop
        self._max = max_sample_bytes
        self._on_bad = on_bad
        self._at = start  # offset of the first byte that is not parsed yet
        self._out: list[Located] = []
        self._done = stop is not None and start >= stop
        self._fault: ShardError | None = None
        self._skip = 0  # samples, good or bad, that are passed over without being made
        self._left = sys.maxsize  # samples, good or bad, until the reader is done

    def narrow(self, skip: int, most: int | None) -> None:
        """Pass over the first `skip` samples, and return or report at most `most` samples after them; None: all.

        A sample is counted whether it is good or bad. A bad sample that is passed over is not reported. Call it before
        the first bytes are fed.
        """
        self._skip, self._left = skip, sys.maxsize if most is None else most
        self._done = self._done or not self._left

    @property
    def feed_from(self) -> int:
        """The offset of the first byte to feed. See `ShardReader.feed_from`."""
        return self._start

    @property
    def done(self) -> bool:
        """Whether the part is completely read. See `ShardReader.done`."""
        return self._done and self._fault is None

    @property
    def pending(self) -> bool:
        """Always False. See `ShardReader.pending`."""
        return False

    def feed(self, chunk: bytes, /) -> list[Located]:
        """Take the next bytes, and return the samples that they complete. See `ShardReader.feed`."""
        return self._call(chunk)

    def end(self) -> list[Located]:
        """Finish after the last byte. See `ShardReader.end`."""
        return self._call(None)

    @abstractmethod
    def _take(self, chunk: bytes) -> None:
        """Parse `chunk`; append to `_out`."""

    @abstractmethod
    def _finish(self) -> None:
        """Handle the end of the bytes: append to `_out`, or fail."""

    def _call(self, chunk: bytes | None) -> list[Located]:
        if self._fault is not None:
            raise self._fault
        out: list[Located] = []
        self._out = out
        if self._done:
            return out
        try:
            if chunk is None:
                self._finish()
                self._done = True
            else:
                self._take(chunk if type(chunk) is bytes else bytes(chunk))
        except ShardError as fault:
            # The samples before the error are returned first; the next call raises it.
            self._fault = fault
            if not out:
                raise
        return out

    def _give(self, fields: Sample, offset: int, resume: int) -> None:
        """Append a sample without a name: its key is the shard's name and the offset of its first byte."""
        fields["__key__"] = f"{self._name}:{offset}"
        fields["__url__"] = self._url
        self._out.append(Located(fields, resume))
        self._left -= 1

    def _fail(self, message: str, offset: int) -> NoReturn:
        raise ShardError(message, url=self._url, offset=offset)

    def _bad(self, message: str, offset: int, resume: int, cause: BaseException | None = None) -> None:
        """Report a bad sample whose end is known: raise it, or pass it to `on_bad` and continue."""
        error = ShardError(message, url=self._url, offset=offset, resume=resume)
        error.__cause__ = cause
        if self._on_bad is None:
            raise error
        self._on_bad(error)
        self._left -= 1

    def _check_size(self, size: int, offset: int) -> None:
        if size > self._max:
            self._fail(f"a sample takes more than max_sample_bytes={self._max:,} bytes", offset)


class PushReader(Reader):
    """A reader that parses its format by the generator `_parse`. Its arguments are those of `Reader`."""

    _may_end = False
    """Set by the parser: the shard may end before the bytes of the last request."""

    def __init__(
        self,
        url: str,
        *,
        start: int = 0,
        stop: int | None = None,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        on_bad: OnBad | None = None,
    ) -> None:
        super().__init__(url, start=start, stop=stop, max_sample_bytes=max_sample_bytes, on_bad=on_bad)
        self._held = bytearray()  # the first bytes of a request that spans chunks
        self._want: int | None = None  # None: the parser has not started
        self._parser = self._parse()

    @abstractmethod
    def _parse(self) -> Parser:
        """Parse the format. While it is suspended, `_at` is the offset of the bytes that it requested."""

    def _take(self, chunk: bytes) -> None:
        send, held = self._parser.send, self._held
        pos, size = 0, len(chunk)
        try:
            want = next(self._parser) if self._want is None else self._want
            while True:
                if want < 0:
                    step = min(-want, size - pos)
                    pos += step
                    self._at += step
                    want += step
                    if want:
                        break
                    data = b""
                elif not held and size - pos >= want:
                    # The common case, with a single copy: from the chunk to the field.
                    data = chunk[pos : pos + want]
                    pos += want
                    self._at += want
                else:
                    part = chunk[pos : pos + want - len(held)]
                    held += part
                    pos += len(part)
                    if len(held) < want:
                        break
                    data = bytes(held)
                    self._held = held = bytearray()
                    self._at += want
                want = send(data)
            self._want = want
        except StopIteration:
            self._done = True

    def _finish(self) -> None:
        # Starts the parser of an empty shard, which may refuse it.
        self._take(b"")
        if self._done:
            return
        # The shard may end between two requests, if the parser allows it, and never inside the bytes of a request.
        if self._held or not self._may_end:
            have = self._at + len(self._held)
            self._fail("the shard is truncated: more bytes must come here", have)
