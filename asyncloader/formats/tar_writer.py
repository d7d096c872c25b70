"""Writes tar shards with WebDataset's naming. Pure.

Data path: samples -> [tar_writer] -> parts -> shard.

Field ``ext`` of sample ``dir/key`` becomes the member ``dir/key.ext``: a plain file, mode 644, of no user, at time 0.
Format: ustar (POSIX.1-2017 `pax`), with a pax header where a name or a size does not fit. `tar` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Buffer

from asyncloader.formats.encoder import RESERVED, BadSample, Part, RecordEncoder, bytes_of_value, dump_json
from asyncloader.formats.tar import BLOCK, is_meta

END = bytes(2 * BLOCK)
LARGEST = 8**11  # of the sizes that a header has room for

_OWNER = b"0000644\0" + 2 * b"0000000\0"
_TIME = b"00000000000\0"
_REST = (b"ustar\00000" + bytes(64) + 2 * b"0000000\0").ljust(BLOCK - 257, b"\0")
# Of the header's bytes but for name, size and type; the checksum's own eight count as blanks.
_SUM = sum(_OWNER) + sum(_TIME) + 8 * 32 + sum(_REST)


class TarEncoder(RecordEncoder):
    """Encodes samples as members of a tar archive.

    A value is bytes; a text, written as UTF-8; or, in a field whose name ends with ``json``, what `json.dumps` takes.
    """

    keyed = True
    base_bytes = len(END)

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's members, like `RecordEncoder.encode_sample`."""
        key = check_key(sample.get("__key__"))
        pieces: list[bytes | memoryview] = []
        for field, value in sample.items():
            if field in RESERVED:
                continue
            check_field(field)
            data = value if type(value) is bytes else encode_value(field, value)
            pieces.append(header(f"{key}.{field}", len(data)))
            pieces.append(data)
            if len(data) % BLOCK:
                pieces.append(bytes(-len(data) % BLOCK))
        if not pieces:
            raise BadSample("it has no field, and a tar holds a sample by its fields only")
        return pieces

    def assemble(self, parts: Sequence[Part]) -> list[Buffer]:
        """Return the bytes of an archive, like `ShardEncoder.assemble`."""
        return [*super().assemble(parts), END]


def check_key(key: Any) -> str:
    """Refuse a key with which the sample would not be read again.

    Raises:
        BadSample: it is missing, or no text; or a reader would not find it in a member's name.
    """
    if key is None:
        raise BadSample(
            'it has no "__key__", from which a tar\'s member names begin: give each sample a text of its own'
        )
    if not isinstance(key, str):
        raise BadSample(f'its "__key__" is a {type(key).__name__}; make it a text')
    base = key.rpartition("/")[2]
    if not base or "." in base:
        raise BadSample(
            "the last part of its key is empty or has a dot, where a reader takes the field's name to begin"
        )
    if "\0" in key or is_meta(key):
        raise BadSample("its key has a NUL, or begins with a part such as __name__, which readers skip")
    return key


def check_field(field: str) -> None:
    """Refuse the name of a field that would be read as another.

    Raises:
        BadSample: it is no text, empty, not in lower case, or has a slash or a NUL.
    """
    if not isinstance(field, str) or not field or field != field.lower() or "/" in field or "\0" in field:
        raise BadSample(
            f"its field {field!r} would be read under another name: fields of a tar are lower-case extensions"
        )


def encode_value(field: str, value: Any) -> bytes:
    """Return the bytes of a member.

    Raises:
        BadSample: the value is neither bytes nor text, and its field no JSON.
    """
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise BadSample(f"its field {field!r} is a text that UTF-8 cannot hold: {error}") from None
    if field.rpartition(".")[2] == "json" and not isinstance(value, bytes | bytearray | memoryview):
        try:
            return dump_json(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadSample(f"its field {field!r} cannot be JSON: {error}") from None
    return bytes_of_value(field, value)


def header(name: str, size: int) -> bytes:
    """Return the header of a member with this name and size: one block, or more with a pax header.

    Raises:
        BadSample: the name has half a character.
    """
    try:
        encoded = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadSample(f"its key, or a field's name, is a text that UTF-8 cannot hold: {error}") from None
    if len(encoded) <= 100 and size < LARGEST:
        return block(encoded, size, b"0")
    records = record(b"path", encoded) if len(encoded) > 100 else b""
    if size >= LARGEST:
        records += record(b"size", b"%d" % size)
    padding = bytes(-len(records) % BLOCK)
    short = block(encoded[:100], min(size, LARGEST - 1), b"0")
    return block(b"././@PaxHeader", len(records), b"x") + records + padding + short


def record(key: bytes, value: bytes) -> bytes:
    """Return a record of a pax header, which begins with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def block(name: bytes, size: int, kind: bytes) -> bytes:
    """Return one header block."""
    digits = b"%011o" % size
    total = _SUM + sum(name) + sum(digits) + kind[0]
    return b"".join((name.ljust(100, b"\0"), _OWNER, digits, b"\0", _TIME, b"%06o\0 " % total, kind, bytes(100), _REST))
