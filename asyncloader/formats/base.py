"""The contract of shard readers, and the types that they share.

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

*Whole samples.* A sample that is read by its number comes whole, and a reader for each would take several times as long
as the function that each format has for it (`ReadWhole`). It makes the same checks. It returns the sample that the
format's reader returns or, for all that is unusual or wrong, None: then the reader decides, and has the error.

*Errors.* Whatever a shard contains, the result is samples or a `ShardError`. The samples before an error are returned
first: if a call of `feed` has samples to return, the next call raises the error. A reader that has failed raises the
same error on every further call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, overload
from urllib.parse import urlsplit

from asyncloader.errors import ShardError

__all__ = [
    "MAX_SAMPLE_BYTES",
    "Located",
    "LocatedSamples",
    "OnBad",
    "ReadWhole",
    "Sample",
    "SampleSlices",
    "ShardError",
    "ShardRange",
    "ShardReader",
    "base_name",
]

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


_PLAIN_URL = re.compile(r"[A-Za-z][A-Za-z0-9]*://[!-\"$->@-Z\\^-~]*")
"""Without query, fragment, brackets, blanks, and letters other than those of ASCII."""


def base_name(url: str) -> str:
    """Return the last part of the URL's path, without query and fragment; keys of unnamed samples begin with it."""
    if "://" not in url:
        path = url
    elif _PLAIN_URL.fullmatch(url):
        # The result of `urlsplit` in a fraction of its time, for a million shards.
        path = url.partition("://")[2].partition("/")[2]
    else:
        path = urlsplit(url).path
    return path.rstrip("/").rpartition("/")[2]
