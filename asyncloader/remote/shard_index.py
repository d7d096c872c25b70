"""The index that a writer keeps beside its shards: counts, sizes and digests, and how far it has come. Pure.

Data path: shard_writing -> [shard_index] -> ``_train-index.tar.json``.

For ``train-{shard:06d}.tar`` it is ``_train-index.tar.json``, in the same folder. No reader takes it for a shard: its
extension is not that of a shard, and with `format=` names that begin with ``_`` are left out. A JSON object:

    asyncloader      "shards"
    version          1
    complete         whether all shards are written; false while a writer runs, and after it was killed
    settings         the writer's arguments that decide the bytes of the shards
    shards           by number: name, samples, bytes (of the object), size (before compression), sha256, and etag, the
                     store's name of these bytes or null
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import format_of, named_format
from asyncloader.transports import ObjectInfo

MAX_INDEX_BYTES = 1 << 30

_MOST = 1 << 63  # of a number in a record

_FIELD = re.compile(r"\{shard(?::0(\d{1,2})d)?\}")


class ShardRecord(NamedTuple):
    """A shard that is complete in the store."""

    name: str
    samples: int
    bytes: int
    size: int
    sha256: str
    etag: str | None

    def fits(self, info: ObjectInfo) -> bool:
        """Whether the store has this very object, as far as it says."""
        return self.bytes == info.size and (None in (self.etag, info.etag) or self.etag == info.etag)


class ShardIndex(NamedTuple):
    """The content of an index file."""

    complete: bool
    settings: Any
    shards: Mapping[int, ShardRecord]


class ShardNames(NamedTuple):
    """The names of the shards that a pattern stands for.

    Attributes:
        folder: the URL up to the names; ends with ``/``, or is empty.
        before: the names' beginning.
        digits: least number of digits of a shard's number.
        after: the names' end.
        format: of the shards.
    """

    folder: str
    before: str
    digits: int
    after: str
    format: ShardFormat

    @classmethod
    def of(cls, url: str, format: str | None) -> ShardNames:
        """Parse ``s3://bucket/train-{shard:06d}.tar``.

        Raises:
            ValueError: the number has no place in the last part, or several; or the extension is not of the format.
        """
        folder, slash, name = url.rpartition("/")
        fields = list(_FIELD.finditer(name))
        rest = _FIELD.sub("", name)
        if len(fields) != 1 or _FIELD.search(folder) or set("{}*") & set(rest):
            raise ValueError(
                f"{url!r} does not say where the shards' numbers stand: write it with {{shard:06d}} once, in the last "
                'part: "s3://bucket/train-{shard:06d}.tar"'
            )
        before, after = name[: fields[0].start()], name[fields[0].end() :]
        try:
            found = format_of(f"shard{after}")
        except ValueError:
            if format is None:
                raise
            found = None
        wanted = named_format(format) or found
        assert wanted is not None
        if found is None or found.name != wanted.name or (wanted.compression and wanted != found):
            raise ValueError(
                f"{url!r} does not end with the extension of format={format!r}, by which readers know it: rename it"
            )
        return cls(folder + slash, before, int(fields[0][1] or 1), after, found)

    def name(self, number: int | str) -> str:
        """Return a shard's name."""
        return (
            f"{self.before}{number:0{self.digits}d}{self.after}"
            if isinstance(number, int)
            else (self.before + number + self.after)
        )

    def number(self, name: str) -> int | None:
        """Return the number of the shard with this name; None: it is no shard's name."""
        digits = name[len(self.before) : len(name) - len(self.after)]
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            return None
        return int(digits) if self.name(int(digits)) == name else None

    @property
    def index_name(self) -> str:
        """The name of the index."""
        return f"_{self.before}index{self.after}.json"


def dump_index(index: ShardIndex) -> bytes:
    """Return the file of an index."""
    shards = {str(number): record._asdict() for number, record in sorted(index.shards.items())}
    found = {"asyncloader": "shards", "version": 1, "complete": index.complete, "settings": index.settings}
    return json.dumps({**found, "shards": shards}, indent=1).encode()


def parse_index(data: bytes, names: ShardNames) -> ShardIndex:
    """Parse and check an index file.

    Raises:
        ValueError: it is no index file, or of another version.
    """
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if type(value) is not dict or value.get("asyncloader") != "shards" or value.get("version") != 1:
        raise ValueError("it is no index of version 1")
    complete, shards = value.get("complete"), value.get("shards")
    if type(complete) is not bool or type(shards) is not dict:
        raise ValueError("complete or shards is missing")
    found: dict[int, ShardRecord] = {}
    for text, record in cast("dict[str, Any]", shards).items():
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
        if type(record) is not dict or record.keys() != set(ShardRecord._fields):
            raise ValueError(f"the record of shard {text!r} has other members")
        each = ShardRecord(**record)
        counts = (each.samples, each.bytes, each.size)
        wrong = any(type(one) is not int or not 0 <= one < _MOST for one in counts)
        if number < 0 or each.name != names.name(number) or wrong:
            raise ValueError(f"the record of shard {text!r} is impossible")
        if type(each.sha256) is not str or not isinstance(each.etag, str | None):
            raise ValueError(f"the record of shard {text!r} is impossible")
        found[number] = each
    return ShardIndex(complete, value.get("settings"), found)
