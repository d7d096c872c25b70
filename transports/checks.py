"""Checks the arguments of all transports: paths, sizes, ranges. Pure.

Data path: [checks] -> each read.
"""

from __future__ import annotations

from math import isfinite
from numbers import Real

from asyncloader.transports.errors import InvalidPath, ObjectTooLarge, RangeOutOfBounds


def check_path(path: str) -> None:
    """Refuse a path that is not canonical, so that one object has one name in every transport.

    A path is one or more parts joined by ``/``. No part is empty, ``.`` or ``..``; no character is NUL, or a surrogate
    that stands for no byte of a name. So a path never begins or ends with ``/``, and never leads out of the root.

    Raises:
        InvalidPath: the path breaks these rules; the message names the part.
    """
    if not path:
        raise InvalidPath("the path is empty; give the path of an object below the transport's root", path=path)
    if path.startswith("/"):
        raise InvalidPath(f"{path!r} is absolute; give a path relative to the transport's root", path=path)
    _check_parts(path, path.split("/"))


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no path of `check_path` can begin with. An empty prefix means everything.

    Raises:
        InvalidPath: a part breaks the rules of `check_path`. The part after the last ``/`` is the beginning of a name,
            and breaks them only with a NUL.
    """
    if prefix.startswith("/"):
        raise InvalidPath(f"prefix {prefix!r} is absolute; give one relative to the transport's root", path=prefix)
    *parents, last = prefix.split("/")
    _check_parts(prefix, parents)
    if "\0" in last:
        raise InvalidPath(f"prefix {prefix!r} holds a NUL character", path=prefix)


def _check_parts(path: str, parts: list[str]) -> None:
    try:
        path.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise InvalidPath(f"{path!r} holds half a character, which no name can have", path=path) from None
    for part in parts:
        if part in {"", ".", ".."}:
            shown = repr(part) if part else "an empty part"
            raise InvalidPath(
                f"{path!r} holds {shown}; paths are canonical and stay below the transport's root", path=path
            )
        if "\0" in part:
            raise InvalidPath(f"{path!r} holds a NUL character", path=path)


def check_size(path: str, size: int, max_bytes: int | None) -> None:
    """Refuse an object of `size` bytes when `max_bytes` (None: no limit) is smaller.

    Raises:
        ObjectTooLarge: it is larger.
        ValueError: `max_bytes` is negative.
    """
    if max_bytes is None:
        return
    if max_bytes < 0:
        raise ValueError(f"max_bytes must be 0 or more, got {max_bytes}")
    if size > max_bytes:
        raise ObjectTooLarge(
            f"{path!r} has {size:,} bytes, more than max_bytes={max_bytes:,}; "
            "raise max_bytes, or read it in parts with read_range() or stream()",
            path=path,
            size=size,
            max_bytes=max_bytes,
        )


def check_range(path: str, size: int, start: int, length: int) -> None:
    """Refuse a byte range that is not within an object of `size` bytes. An empty range is always allowed.

    Raises:
        RangeOutOfBounds: it ends after the object does.
        ValueError: `start` or `length` is negative.
    """
    if start < 0 or length < 0:
        raise ValueError(f"a byte range needs start and length of 0 or more, got start={start}, length={length}")
    if length and start + length > size:
        raise RangeOutOfBounds(
            f"bytes {start:,} to {start + length:,} of {path!r} were asked for, but it has {size:,} bytes; "
            "the index that named the range may belong to another version of the object",
            path=path,
            size=size,
        )


def check_start(path: str, size: int | None, start: int) -> None:
    """Refuse the start of a stream that is after the end of an object of `size` bytes (None: not known yet).

    Raises:
        RangeOutOfBounds: the object ends before `start`. If it ends there, the stream is empty.
        ValueError: `start` is negative.
    """
    if start < 0:
        raise ValueError(f"start must be 0 or more bytes, got {start}")
    if size is not None and start > size:
        raise RangeOutOfBounds(
            f"a stream from byte {start:,} of {path!r} was asked for, but it has {size:,} bytes; "
            "the position may belong to another version of the object",
            path=path,
            size=size,
        )


def check_chunk_size(chunk_size: int) -> None:
    """Refuse a chunk size below 1 byte with ValueError."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 byte, got {chunk_size}")


def check_limits(requests: int, min_bytes_per_s: float, **seconds: float) -> None:
    """Check the limits of concurrent requests, of rates and of waits.

    Raises:
        TypeError: one of them is no number.
        ValueError: `requests` is below 1, the rate is negative, or one of the `seconds` is not above 0 and finite.
    """
    for name, value in {"requests": requests, "min_bytes_per_s": min_bytes_per_s, **seconds}.items():
        if not isinstance(value, Real):
            raise TypeError(f"{name}={value!r} is no number")
    if not (isfinite(min_bytes_per_s) and min_bytes_per_s >= 0):
        raise ValueError(f"min_bytes_per_s must be 0 or more bytes per second, got {min_bytes_per_s}")
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    for name, each in seconds.items():
        if not (isfinite(each) and each > 0):
            raise ValueError(f"{name} must be above 0 seconds, got {each}")
