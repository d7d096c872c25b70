"""Interprets the heads of HTTP responses: versions, ranges and statuses. Pure.

Data path: http, http_client -> [http_answers].

No hostile header causes an exception: an invalid header counts as missing. Texts for users show URLs by `safe_url`,
because userinfo and query strings contain passwords and signatures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from asyncloader.transports.errors import AccessDenied, ObjectNotFound, ReadFailed, TransportError
from asyncloader.transports.object_version import Version, is_strong

Headers = Mapping[str, str]
"""Header names to values; the caller's mapping ignores the case of names."""

_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

# RFC 9110 section 8.8.2.2: a date is a strong validator if the response was made at least a second after it. A minute,
# as in RFC 7232, allows for differing clocks.
_SETTLED_S = 60.0


class ContentRange(NamedTuple):
    """A ``Content-Range`` header. `start` and `end` (exclusive) are None in ``bytes */total``."""

    start: int | None
    end: int | None
    total: int | None


def version_of(headers: Headers, size: int | None) -> Version:
    """Read the version of an object of `size` bytes (None: not stated) from a response's headers."""
    etag, modified = _field(headers, "ETag"), _field(headers, "Last-Modified")
    settled = False
    # Not beside a strong ETag, which is the validator: to parse two dates takes as long as all else in an answer.
    if modified is not None and not is_strong(etag) and (date := headers.get("Date")):
        settled = _seconds_between(modified, date) >= _SETTLED_S
    return Version(etag, modified, settled, size)


def _field(headers: Headers, name: str) -> str | None:
    """Return a header; None if it is missing, or has a control character: aiohttp cannot send it back."""
    value = headers.get(name)
    # No control character is printable: a search for them takes longer.
    return None if not value or (not value.isprintable() and _CONTROL.search(value)) else value


def content_length(headers: Headers) -> int | None:
    """Return the ``Content-Length``; None if it is missing or not a number."""
    value = headers.get("Content-Length", "").strip()
    return int(value) if len(value) <= 18 and value.isdecimal() and value.isascii() else None


def parse_content_range(value: str | None) -> ContentRange | None:
    """Parse a ``Content-Range``; None if it is missing, not a byte range, or contradicts itself."""
    match = _CONTENT_RANGE.fullmatch((value or "").strip())
    if match is None:
        return None
    first, last, total = match.groups()
    size = None if total == "*" else int(total)
    if first is None:
        return ContentRange(None, None, size)
    start, end = int(first), int(last) + 1
    if end <= start or (size is not None and end > size):
        return None
    return ContentRange(start, end, size)


def foreign_encoding(headers: Headers) -> str | None:
    """Return the ``Content-Encoding`` if the body is not the object's own bytes, otherwise None."""
    value = headers.get("Content-Encoding", "").strip()
    return None if value.lower() in {"", "identity"} else value


def safe_url(url: str) -> str:
    """Return the URL without what may be secret: userinfo, the values of its query, and the fragment."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(a malformed URL)"
    return f"{parts.scheme}://{host}{parts.path}{'?...' if parts.query else ''}"


def status_error(status: int, reason: str | None, url: str, path: str, note: str = "") -> TransportError:
    """Make the error for a response that does not contain the object.

    Args:
        status: the HTTP status.
        reason: the server's reason phrase.
        url: the requested URL, with its secrets, which the text does not show.
        path: the object's path in its transport.
        note: an additional clause.
    """
    answer = f"{safe_url(url)} answered {status}{' ' + reason[:80] if reason else ''}{'; ' + note if note else ''}"
    if status in {404, 410}:
        return ObjectNotFound(f"{path!r} does not exist: {answer}", path=path)
    if status in {401, 403, 407, 451}:
        return AccessDenied(f"no permission to read {path!r}: {answer}", path=path)
    return ReadFailed(f"reading {path!r} failed: {answer}", path=path)


def _seconds_between(earlier: str, later: str) -> float:
    from email.utils import parsedate_to_datetime

    try:
        return (parsedate_to_datetime(later) - parsedate_to_datetime(earlier)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return -1.0
