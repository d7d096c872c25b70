"""Identifies the version of an object by the names that a store's answer gives it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """Identifies one version of an object.

    Attributes:
        etag: the ``ETag`` header as sent, weak or strong; None if it is missing.
        modified: the ``Last-Modified`` header as sent; None if it is missing.
        settled: whether `modified` is old enough that any later change would have a different date. False, too, beside
            a strong ETag.
        size: bytes of the whole object, None if not stated.
    """

    etag: str | None
    modified: str | None = None
    settled: bool = False
    size: int | None = None

    @property
    def validator(self) -> str | None:
        """The value for ``If-Range``: a strong ETag, or a date of modification that is old enough to be as strong (RFC
        9110 section 8.8.2.2), also beside a weak ETag; None if nothing proves that the bytes are equal.
        """
        if is_strong(self.etag):
            return self.etag
        return self.modified if self.settled else None

    @property
    def name(self) -> str | None:
        """A text that differs for other bytes, as in `ObjectInfo.etag`; None without a validator."""
        validator = self.validator
        # With a date for a validator, the weak ETag is part of the name: an object may be replaced by another with the
        # same date, as by a copy that keeps it.
        return validator if None in {validator, self.etag} or validator == self.etag else f"{self.etag} {validator}"

    def differs(self, other: Version) -> bool:
        """Return whether the two are certainly not the same version."""
        if None not in {self.size, other.size} and self.size != other.size:
            return True
        if self.etag is not None and other.etag is not None:
            return self.etag != other.etag
        return None not in {self.modified, other.modified} and self.modified != other.modified

    def proves(self, other: Version) -> bool:
        """Return whether the two are certainly the same version, byte for byte."""
        return self.validator is not None and self.validator == other.validator and not self.differs(other)

    def resembles(self, other: Version) -> bool:
        """Return whether the store says that the two are the same version, if only by a weak ETag or a new date."""
        if self.differs(other):
            return False
        # Beside ETags the dates do not count: two servers may have copies with different dates.
        if self.etag is not None or other.etag is not None:
            return self.etag == other.etag
        return self.modified is not None and self.modified == other.modified


def is_strong(etag: str | None) -> bool:
    """Return whether an ETag identifies the bytes, and not only what they mean."""
    return not (etag or "W/").startswith(("W/", "w/"))
