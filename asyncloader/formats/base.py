"""The contract of shard readers, the types that they share, and the base classes of our own. Pure.

Data path: transport -> chunks -> [base: reader] -> samples.

A reader takes bytes and returns samples; it opens nothing, never blocks, and uses no event loop. A caller's loop:

    reader = open_reader(url)
    async for chunk in stream_from(reader.feed_from):
        found = reader.feed(chunk)
        while found or reader.pending:
            for sample, resume in found:
                ...
            found = reader.feed(b"") if reader.pending else []
        if reader.done:
            break
    else:
        for sample, resume in reader.end():
            ...

The contract, which a user's own reader must satisfy, too:

*Chunks.* The samples, resume offsets and errors do not depend on how the bytes are split into chunks.

*Memory.* A reader holds the bytes of one sample (at most `max_sample_bytes`) and the rest of the last chunk. Sizes that
a shard claims are checked before memory is allocated for them.

*Resume.* Each sample comes with the offset after it. A new reader of the same shard with ``start=resume``, fed from its
`feed_from`, returns exactly the samples that follow. Offsets count the bytes of the shard; in a compressed shard they
count decompressed bytes, and `feed_from` is 0 because no offset inside can be reached directly.

*Whole samples.* A sample that is read by its number comes whole, and a reader for each would take twice as long as the
function that each format has for it (`ReadWhole`). It makes the same checks. It returns the sample that the format's
reader returns or, for all that is unusual or wrong, None: then the reader decides, and has the error.

*Errors.* Whatever a shard contains, the result is samples or a `ShardError`. The samples before an error are returned
first: if a call of `feed` has samples to return, the next call raises the error. A reader that has failed raises the
same error on every further call.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, overload

from asyncloader.errors import ShardError

MAX_SAMPLE_BYTES = 1 << 30
"""Default of `max_sample_bytes`: 1 GiB."""

Sample: TypeAlias = dict[str, Any]
"""``__key__`` (str), ``__url__`` (str), and the sample's fields: raw bytes, or the values that the format decodes."""


OnBad: TypeAlias = Callable[[ShardError], None]
"""Called with a bad sample that can be skipped. When it returns, the reader continues with the next sample, at the
error's `resume`.
"""


class Located(NamedTuple):
    """A sample, and the offset at which to continue after it.

    Attributes:
        sample: the sample.
        resume: a reader with ``start=resume`` returns the samples that follow.
    """

    sample: Sample
    resume: int


class LocatedSamples(Sequence[Located]):
    """Consecutive samples, which share a list: an object for each would cost as much as a small sample.

    Args:
        samples: the samples.
        resumes: the offset after each; of rows of a table, the number of the row after it.
        further: returns the samples after them, as far as they can be made without waiting; None if none can. It raises
            nothing: an error is raised where further samples are waited for. A slice does not have it.
    """

    __slots__ = ("further", "resumes", "samples")

    def __init__(
        self,
        samples: Sequence[Sample],
        resumes: Sequence[int],
        further: Callable[[], LocatedSamples | None] | None = None,
    ) -> None:
        self.samples = samples
        self.resumes = resumes
        self.further = further

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Located: ...
    @overload
    def __getitem__(self, index: slice) -> LocatedSamples: ...
    def __getitem__(self, index: int | slice) -> Located | LocatedSamples:
        if isinstance(index, slice):
            return LocatedSamples(self.samples[index], self.resumes[index])
        return Located(self.samples[index], self.resumes[index])


class ShardRange(NamedTuple):
    """A part of a shard: the samples whose first byte is in ``[start, stop)``.

    Attributes:
        start: offset of the first byte.
        stop: offset after the last byte; None for the end of the shard.
        sync: `start` may lie inside a sample, which then belongs to the previous part.
    """

    start: int
    stop: int | None
    sync: bool


class ShardReader(Protocol):
    """The interface of a reader; see the module for the contract. A user's own class needs no base class."""

    @property
    def feed_from(self) -> int:
        """Offset in the object of the first byte to feed."""
        ...

    @property
    def done(self) -> bool:
        """Whether the shard, or the requested part of it, is completely read."""
        ...

    @property
    def pending(self) -> bool:
        """Whether ``feed(b"")`` may return further samples from the bytes so far; the caller must call it before it
        feeds more bytes.

        Only compressed shards need this: a chunk of them may decompress to a thousand times its size.
        """
        ...

    def feed(self, chunk: bytes, /) -> list[Located]:
        """Take the next bytes, any number of them; return the samples that they complete.

        Raises:
            ShardError: see the module.
        """
        ...

    def end(self) -> list[Located]:
        """Finish after the last byte; return the samples that are complete only now.

        Raises:
            ShardError: the shard ends in the middle of a sample; or an error of `feed`.
        """
        ...


class SampleSlices(Protocol):
    """Has the bytes of samples: bytes, or a file, of which parts are read without a copy of the whole sample."""

    def __getitem__(self, part: slice, /) -> bytes:
        """Return ``part.stop - part.start`` bytes. There is no step, and neither is left out."""
        ...


ReadWhole: TypeAlias = Callable[[SampleSlices, int, int, int], Sample | None]
"""Called with a source, the positions in it at which a sample's bytes begin and end, and their offset in the shard."""


def base_name(url: str) -> str:
    """Return the last part of the URL's path, without query and fragment; keys of unnamed samples begin with it."""
    scheme, separator, rest = url.partition("://")
    path = scheme
    if separator:
        path = rest.partition("#")[0].partition("?")[0].partition("/")[2]
    return path.rstrip("/").rpartition("/")[2]


Parser: TypeAlias = Generator[int, bytes, None]
"""A parser that reads like code that reads a file: it yields the number of bytes that it needs next, gets them as the
value of the ``yield``, and is suspended where the bytes end. A negative number skips bytes without holding them. It
returns at the shard's end.
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
        self._held = bytearray()  # the first bytes of a request, or of a line, that spans chunks

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
        raise ShardError(message, url=self._url, offset=offset) from None

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
    _want: int | None = None  # the last request; None: the parser has not started

    @abstractmethod
    def _parse(self) -> Parser:
        """Parse the format. While it is suspended, `_at` is the offset of the bytes that it requested."""

    def _take(self, chunk: bytes) -> None:
        if self._want is None:
            self._parser = self._parse()
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
