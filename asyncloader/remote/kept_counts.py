"""Keeps the numbers of samples of counted shards in a file of the cache directory.

Data path: sample_counts -> [kept_counts: cache_dir] -> sample_counts of the next run.

    cache_dir/asyncloader-counts-1/NAME.counts      NAME: a hash of the dataset's URLs

A record is found by a hash of the shard's URL, size and ETag, and of the way in which it is read: a shard that was
replaced has none. The file is written anew, under another name, and renamed. A file with a wrong checksum
is ignored. Any number of processes may use it; the last to write it wins.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from asyncloader.remote.sample_counts import MARKS, Counted

FOLDER = "asyncloader-counts-1"

MAX_FILE_BYTES = 1 << 30

_MAGIC = b"ALcount1"
_HEAD = struct.Struct("<8s16sQ")  # magic, hash of the rest, number of shards
_KEY = 16

_log = logging.getLogger("asyncloader")


def hash_of(*values: object) -> bytes:
    """Return 16 bytes that stand for these plain values."""
    return blake2b(repr(values).encode(errors="surrogatepass"), digest_size=_KEY).digest()


def pack_counts(counts: Mapping[bytes, Counted]) -> bytes:
    """Return the file of these shards, by their hashes."""
    samples = np.array([each.samples for each in counts.values()], "<i8")
    marks = [np.empty((2, 0), np.int64) if each.marks is None else each.marks for each in counts.values()]
    sizes = np.array([each.shape[1] for each in marks], "<i8")
    numbers = np.concatenate([each.ravel() for each in marks]) if marks else np.empty(0)
    body = b"".join([*counts, samples.tobytes(), sizes.tobytes(), numbers.astype("<i8").tobytes()])
    return _HEAD.pack(_MAGIC, blake2b(body, digest_size=_KEY).digest(), len(counts)) + body


def parse_counts(data: bytes) -> dict[bytes, Counted]:
    """Return the shards of a file; none if it is damaged."""
    if len(data) < _HEAD.size:
        return {}
    magic, digest, shards = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or digest != blake2b(body, digest_size=_KEY).digest() or shards * (_KEY + 16) > len(body):
        return {}
    samples = np.frombuffer(body, "<i8", shards, shards * _KEY)
    sizes = np.frombuffer(body, "<i8", shards, shards * (_KEY + 8))
    numbers = np.frombuffer(body, "<i8", offset=shards * (_KEY + 16))
    if (samples < 0).any() or (sizes < 0).any() or (sizes > MARKS).any() or 2 * sizes.sum() != len(numbers):
        return {}
    ends = np.cumsum(2 * sizes).tolist()
    found: dict[bytes, Counted] = {}
    for at, (count, size) in enumerate(zip(samples.tolist(), sizes.tolist(), strict=True)):
        marks = numbers[ends[at] - 2 * size : ends[at]].reshape(2, size).astype(np.int64) if size else None
        found[body[at * _KEY : (at + 1) * _KEY]] = Counted(count, marks)
    return found


def read_counts(cache_dir: str, name: str) -> dict[bytes, Counted]:
    """Return the shards that are kept under a name; none if the file cannot be read. Blocks."""
    path = Path(cache_dir, FOLDER, f"{name}.counts")
    with suppress(OSError):
        if path.stat().st_size <= MAX_FILE_BYTES:
            return parse_counts(path.read_bytes())
    return {}


def write_counts(cache_dir: str, name: str, counts: Mapping[bytes, Counted]) -> None:
    """Keep shards under a name, in place of earlier ones. An error of the disk is logged. Blocks."""
    folder, temporary = Path(cache_dir, FOLDER), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".partial", f".{name}.", folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pack_counts(counts))
        Path(temporary).replace(folder / f"{name}.counts")
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        _log.warning("the samples of the shards will be counted again by the next run: %s", error)
