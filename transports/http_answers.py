"""What the heads of HTTP answers mean (pure). Data path: http answer -> [meaning] -> error, or where bytes belong.

Nothing here raises on a hostile header: what cannot be understood counts as not said. Texts for users name
URLs by `safe_url`, because userinfo and query strings carry passwords and signatures.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from asyncloader.transports.errors import AccessDenied, ObjectNotFound, ReadFailed, TransportError

__all__ = [
    "ContentRange",
    "Version",
    "content_length",
    "declared_digest",
    "foreign_encoding",
    "parse_content_range",
    "safe_url",
    "status_error",
]

Headers = Mapping[str, str]
"""Header names to values; the caller's mapping ignores the case of names."""

_NUMBER = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", re.IGNORECASE)
_REPR_DIGEST = re.compile(r"(sha-256|sha-512)=:([A-Za-z0-9+/=]+):")
_GOOGLE_MD5 = re.compile(r"(?:^|[ ,])md5=([A-Za-z0-9+/=]+)")

# RFC 9110 section 8.8.2.2: a date is a strong validator when the answer was made at least a second after it. A
# minute, as in RFC 7232, leaves room for clocks that differ.
_SETTLED_S = 60.0


class ContentRange(NamedTuple):
    """A ``Content-Range`` header. `start` and `end` (exclusive) are None in ``bytes */total``."""

    start: int | None
    end: int | None
    total: int | None


class Version(NamedTuple):
    """By what one version of an object is told from another.

    Attributes:
        etag: as sent, weak or strong; None when there is none.
        modified: the ``Last-Modified`` header as sent.
        settled: whether `modified` is so long ago that a later change would have another date.
        size: bytes of the whole object, None when not said.
    """

    etag: str | None
    modified: str | None
    settled: bool
    size: int | None

    @classmethod
    def of(cls, headers: Headers, size: int | None) -> Version:
        """Read the version from an answer's headers."""
        etag = headers.get("ETag") or None
        modified = headers.get("Last-Modified") or None
        settled = False
        if modified is not None and (date := headers.get("Date")):
            settled = _seconds_between(modified, date) >= _SETTLED_S
        return cls(etag, modified, settled, size)

    @property
    def validator(self) -> str | None:
        """What to send as ``If-Range``, None when nothing proves byte-for-byte equality."""
        if self.etag is not None:
            return None if self.etag.startswith(("W/", "w/")) else self.etag
        return self.modified if self.settled else None

    def differs(self, other: Version) -> bool:
        """Whether the two are certainly not the same version."""
        if None not in {self.size, other.size} and self.size != other.size:
            return True
        if self.etag is not None and other.etag is not None:
            return self.etag != other.etag
        return None not in {self.modified, other.modified} and self.modified != other.modified

    def proves(self, other: Version) -> bool:
        """Whether the two are certainly the same version, byte for byte."""
        return self.validator is not None and self.validator == other.validator and not self.differs(other)


def content_length(headers: Headers) -> int | None:
    """Give the ``Content-Length``, None when there is none or it is no number."""
    value = headers.get("Content-Length", "").strip()
    return int(value) if _NUMBER.fullmatch(value) else None


def parse_content_range(value: str | None) -> ContentRange | None:
    """Read a ``Content-Range``; None when there is none, it is no byte range, or it contradicts itself."""
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
    """Give the ``Content-Encoding`` if the body is not the object as it is, else None."""
    value = headers.get("Content-Encoding", "").strip()
    return None if value.lower() in {"", "identity"} else value


def declared_digest(headers: Headers) -> tuple[str, bytes] | None:
    """Give the digest of the whole body that the server declares: hashlib's name and the value.

    Of ``Repr-Digest`` (RFC 9530; sha-256, sha-512), ``x-goog-hash`` (md5) and ``Content-MD5``, the first. Google's is
    of the bytes as they are stored: where it unpacks them on the way, nothing is declared for what arrives.
    """
    if match := _REPR_DIGEST.search(headers.get("Repr-Digest", "")):
        name = match[1].replace("-", "")
        return _digest(name, match[2], 32 if name == "sha256" else 64)
    stored = headers.get("x-goog-stored-content-encoding", "").strip().lower()
    as_stored = stored in {"", "identity", headers.get("Content-Encoding", "").strip().lower()}
    if as_stored and (match := _GOOGLE_MD5.search(headers.get("x-goog-hash", ""))):
        return _digest("md5", match[1], 16)
    return _digest("md5", headers.get("Content-MD5", "").strip(), 16)


def safe_url(url: str) -> str:
    """Give the URL without what may be secret: userinfo, the values of its query, and the fragment."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(a malformed URL)"
    return f"{parts.scheme}://{host}{parts.path}{'?...' if parts.query else ''}"


def status_error(status: int, reason: str | None, url: str, path: str, note: str = "") -> TransportError:
    """Make the error for an answer that has no object in it.

    Args:
        status: the HTTP status.
        reason: the server's words for it.
        url: what was asked, secrets included.
        path: the object's path in its transport.
        note: what else there is to say, a clause.
    """
    answer = f"{safe_url(url)} answered {status}{' ' + reason[:80] if reason else ''}{'; ' + note if note else ''}"
    if status in {404, 410}:
        return ObjectNotFound(f"{path!r} does not exist: {answer}", path=path)
    if status in {401, 403, 407, 451}:
        return AccessDenied(f"no permission to read {path!r}: {answer}", path=path)
    return ReadFailed(f"reading {path!r} failed: {answer}", path=path)


def _digest(name: str, encoded: str, length: int) -> tuple[str, bytes] | None:
    try:
        value = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    return (name, value) if len(value) == length else None


def _seconds_between(earlier: str, later: str) -> float:
    from email.utils import parsedate_to_datetime

    try:
        return (parsedate_to_datetime(later) - parsedate_to_datetime(earlier)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return -1.0
