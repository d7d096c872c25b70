"""What every reader of shards keeps to, and the words it uses. Data path: transport -> chunks -> [reader] -> samples.

A reader is told bytes and gives samples; it opens nothing, waits for nothing and knows no event loop. Whoever moves the
bytes drives it:

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

The contract, which a user's own reader keeps as well:

*Chunks.* Any split of the same bytes into chunks gives the same samples, resume offsets and errors.

*Memory.* A reader holds the bytes of one sample (`max_sample_bytes` at most) and what is left of the last chunk. Sizes
that a shard claims are checked before memory is set aside for them.

*Resume.* With each sample comes the offset after it. A new reader of the same shard with ``start=resume``, fed from its
`feed_from` on, gives exactly the samples that follow. Offsets count the bytes of the shard; in a compressed shard they
count decompressed bytes, and `feed_from` is 0 because no place inside can be reached directly.

*Errors.* Whatever a shard holds, the outcome is samples or a `ShardError`. The samples before a fault come first: when
a call of `feed` has samples to give, the error is kept for the next call. A reader that has failed raises the same
error at every further call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import urlsplit

from asyncloader.errors import ShardError

__all__ = ["MAX_SAMPLE_BYTES", "Located", "OnBad", "Sample", "ShardError", "ShardRange", "ShardReader", "base_name"]

MAX_SAMPLE_BYTES = 1 << 30
"""Default of `max_sample_bytes`: 1 GiB."""

Sample: TypeAlias = dict[str, Any]
"""``__key__`` (str), ``__url__`` (str), and the sample's fields: raw bytes, or what the format itself decodes to."""


OnBad: TypeAlias = Callable[[ShardError], None]
"""Is told of a bad sample that can be stepped over; the reader goes on with the next one, at the error's `resume`, when
it returns."""


class Located(NamedTuple):
    """A sample, and where to go on after it.

    Attributes:
        sample: the sample.
        resume: the offset from which a reader with ``start=resume`` gives the samples that follow.
    """

    sample: Sample
    resume: int


class ShardRange(NamedTuple):
    """A part of a shard: the samples whose first byte is in ``[start, stop)``.

    Attributes:
        start: offset of the part's first byte.
        stop: offset after its last one; None for the end of the shard.
        sync: `start` may lie inside a sample, which then belongs to the part before.
    """

    start: int
    stop: int | None
    sync: bool


class ShardReader(Protocol):
    """What the loader asks of a reader; the module has the contract. A class of your own needs no base class."""

    @property
    def feed_from(self) -> int:
        """Offset in the object of the first byte that `feed` must be given."""
        ...

    @property
    def done(self) -> bool:
        """Nothing more is wanted: the shard, or the part that was asked for, is read."""
        ...

    @property
    def pending(self) -> bool:
        """A call of ``feed(b"")`` may give further samples of the bytes given so far; make it before feeding more.

        Only compressed shards need it: a chunk of them may hold a thousand times its size.
        """
        ...

    def feed(self, chunk: bytes, /) -> list[Located]:
        """Take the next bytes, any number of them; give the samples that they complete.

        Raises:
            ShardError: see the module.
        """
        ...

    def end(self) -> list[Located]:
        """Be told that there are no more bytes; give what could be told only now.

        Raises:
            ShardError: the shard ends in the middle; or as `feed`.
        """
        ...


def base_name(url: str) -> str:
    """The last part of the URL's path, without query and fragment; the keys of unnamed samples begin with it."""
    path = urlsplit(url).path if "://" in url else url
    return path.rstrip("/").rpartition("/")[2]
