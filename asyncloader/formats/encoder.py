"""The contract of shard writers, and the types that they share. Pure.

Data path: samples -> [encoder: encoded samples -> parts of a shard] -> the shard's bytes.

An encoder turns samples into bytes in two steps, so that workers can take the first, and the shards are cut between
them: `batch` or `encode`, for any number of samples, in any process; and `assemble`, once for each shard. The bytes of
a shard depend on its samples alone: not on how they were grouped for `encode`, the time, the user or the machine.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

RESERVED = frozenset(("__key__", "__url__"))
"""Not fields of a sample: the reader sets them."""

SMALL = 1 << 16
"""Pieces with fewer bytes are joined with their neighbours; others are not copied."""


class EncodingFailure(NamedTuple):
    """A sample that cannot be encoded: its number in the call, its key if it has one, and what is wrong with it."""

    number: int
    key: str
    text: str


class EncodedSamples(NamedTuple):
    """Encoded samples.

    Attributes:
        data: their bytes, in pieces that need not end where samples do.
        sizes: bytes of each sample, as the size of a shard counts them.
        keys: of the samples, where a shard must not contain a key twice; otherwise empty.
        failure: the first sample that could not be encoded, which follows those in `data`; None: all could.
    """

    data: Sequence[memoryview]
    sizes: npt.NDArray[np.int64]
    keys: list[str]
    failure: EncodingFailure | None


class Part(NamedTuple):
    """The samples ``[first, stop)`` of an `EncodedSamples`."""

    encoded: EncodedSamples
    first: int
    stop: int


class BadSample(ValueError):
    """The sample cannot be encoded; the text says why, and what to do."""


def check_names(sample: Mapping[Any, Any]) -> None:
    """Refuse a sample with a field whose name is no text.

    Raises:
        BadSample: it has one.
    """
    for name in sample:
        if not isinstance(name, str):
            raise BadSample(f"the name of its field {name!r} is a {type(name).__name__}; make it a text")


class EncodedBatch(ABC):
    """Samples that are being encoded together. `add` keeps no reference to a value that its owner may change.

    Attributes:
        size: bytes of the samples so far, approximately.
        count: number of samples so far.
        failure: the sample that could not be encoded; after it, none is added.
    """

    def __init__(self) -> None:
        self.size = 0
        self.count = 0
        self.failure: EncodingFailure | None = None

    def add(self, sample: Mapping[str, Any]) -> bool:
        """Add a sample; return whether it can be encoded."""
        try:
            if type(sample) is not dict and not isinstance(sample, Mapping):
                raise BadSample(f"it is a {type(sample).__name__}; a sample is a dictionary of its fields")
            self._add(sample)
        except BadSample as error:
            key = sample.get("__key__") if isinstance(sample, Mapping) else None
            self.failure = EncodingFailure(self.count, key if isinstance(key, str) else "", str(error))
            return False
        self.count += 1
        return True

    @abstractmethod
    def _add(self, sample: Mapping[str, Any]) -> None:
        """Raises BadSample."""

    @abstractmethod
    def finish(self) -> EncodedSamples:
        """Return the samples that were added, and the failure."""


class ShardEncoder(ABC):
    """Encodes the samples of one format. Pickles."""

    largest: ClassVar[int | None] = None
    """Most bytes that a shard of this format may have; None: no limit."""

    base_bytes: int = 0
    """Bytes of a shard without samples."""

    sample_bytes: int = 0
    """Bytes that each sample adds to a shard, besides its `EncodedSamples.sizes`."""

    @abstractmethod
    def batch(self) -> EncodedBatch:
        """Begin to encode samples."""

    @abstractmethod
    def assemble(self, parts: Sequence[Part]) -> list[Buffer]:
        """Return the bytes of the shard with these samples, in pieces. Takes CPU time: call it in a thread."""

    def describe(self) -> Any:
        """Return what decides, besides the samples, the bytes of a shard: plain JSON values."""
        return None

    def encode(self, samples: Iterable[Mapping[str, Any]]) -> EncodedSamples:
        """Encode samples, up to the first that cannot be encoded."""
        batch = self.batch()
        for sample in samples:
            if not batch.add(sample):
                break
        return batch.finish()


class RecordEncoder(ShardEncoder):
    """An encoder of a format whose shards are the samples' bytes, one after the other."""

    keyed: ClassVar[bool] = False
    """Whether a shard must not contain a ``__key__`` twice."""

    @abstractmethod
    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return the bytes of a sample, in pieces.

        Raises:
            BadSample: the format cannot hold it.
        """

    def batch(self) -> EncodedBatch:
        """Begin to encode samples, like `ShardEncoder.batch`."""
        return _RecordBatch(self)

    def assemble(self, parts: Sequence[Part]) -> list[Buffer]:
        """Return the bytes of a shard, like `ShardEncoder.assemble`."""
        found: list[Buffer] = []
        for encoded, first, stop in parts:
            begin = int(encoded.sizes[:first].sum())
            end = begin + int(encoded.sizes[first:stop].sum())
            at = 0
            for piece in encoded.data:
                if begin < at + len(piece) and at < end:
                    found.append(piece[max(0, begin - at) : end - at])
                at += len(piece)
        return found


class _RecordBatch(EncodedBatch):
    def __init__(self, encoder: RecordEncoder) -> None:
        super().__init__()
        self._encoder = encoder
        self._pieces: list[bytes | memoryview] = []
        self._sizes: list[int] = []
        self._keys: list[str] = []

    def _add(self, sample: Mapping[str, Any]) -> None:
        found = self._encoder.encode_sample(sample)
        size = 0
        for piece in found:
            size += len(piece)
        if self._encoder.keyed:
            self._keys.append(sample["__key__"])
        self._pieces += found
        self._sizes.append(size)
        self.size += size

    def finish(self) -> EncodedSamples:
        """Return the samples, like `EncodedBatch.finish`."""
        return EncodedSamples(join(self._pieces), np.array(self._sizes, np.int64), self._keys, self.failure)


def check_fields(sample: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    """Refuse a sample that has other fields than the columns.

    Raises:
        BadSample: a column is missing, or a field is no column.
    """
    if set(sample) - RESERVED != set(columns):
        missing = sorted(columns.keys() - sample.keys())
        if missing:
            raise BadSample(f"it has no field {missing[0]!r}, which is a column; all samples have the same fields")
        extra = sorted(sample.keys() - RESERVED - columns.keys())
        raise BadSample(
            f"its field {extra[0]!r} is no column; the columns, those of the first sample unless columns= "
            f"names them, are {', '.join(map(repr, columns))}"
        )


def dump_json(field: str, value: Any, **options: Any) -> bytes:
    """Return a field's value as JSON.

    Raises:
        BadSample: it cannot be JSON, or has keys as `check_keys` refuses.
    """
    try:
        text = json.dumps(value, **options).encode()
        check_keys(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadSample(f"its field {field!r} cannot be JSON: {error}") from None
    return text


def encode_text(field: str, value: str) -> bytes:
    """Return a field's text as UTF-8.

    Raises:
        BadSample: it has half a character.
    """
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadSample(f"its field {field!r} is a text that UTF-8 cannot hold: {error}") from None


def check_keys(value: Any) -> None:
    """Refuse a dictionary, at any depth, two keys of which are the same in JSON, such as 1 and "1".

    Raises:
        ValueError: JSON would keep one of their values.
    """
    if isinstance(value, dict):
        fields: dict[Any, Any] = value
        if not all(isinstance(key, str) for key in fields):
            seen: dict[str, Any] = {}
            for key in fields:
                name = key if isinstance(key, str) else json.dumps(key)
                if name in seen:
                    raise ValueError(f"its keys {seen[name]!r} and {key!r} are the same in JSON")
                seen[name] = key
        value = list(fields.values())
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, dict | list | tuple):
            check_keys(item)


def to_floats(values: Sequence[Any] | npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return numbers as floats of a type, to which floats are rounded.

    Raises:
        ValueError, OverflowError: a finite number would be infinite, or an integer another one.
    """
    with np.errstate(over="ignore"):
        wide = np.array(values, np.float64)
        found = wide.astype(dtype)
    if (np.isinf(found) & ~np.isinf(wide)).any():
        raise ValueError(f"{values[int(np.isinf(found).argmax())]} is too large")
    of_floats = isinstance(values, np.ndarray) and values.dtype.kind == "f"
    for value, stored in () if of_floats else zip(values, found.tolist(), strict=True):
        if isinstance(value, Integral) and int(stored) != int(value):
            raise ValueError(f"{value} has more digits than they hold, and would become {int(stored)}")
    return found


def bytes_of_value(field: str, value: Any) -> bytes:
    """Return a bytes-like value's bytes.

    Raises:
        BadSample: it is not bytes-like.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)  # the caller may change it
    if isinstance(value, memoryview):
        return value.tobytes()
    raise BadSample(f"its field {field!r} is a {type(value).__name__}; encode it to bytes")


def join(pieces: Iterable[bytes | memoryview]) -> list[memoryview]:
    """Return the same bytes in fewer pieces: small neighbours are joined."""
    found: list[memoryview] = []
    small: list[bytes | memoryview] = []
    for piece in pieces:
        if len(piece) < SMALL:
            small.append(piece)
            continue
        if small:
            found.append(memoryview(b"".join(small)))
            small.clear()
        found.append(memoryview(piece))
    if small:
        found.append(memoryview(b"".join(small)))
    return found
