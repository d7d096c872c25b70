"""The version of an object, as a download needs it from a store's answer. Pure."""

from __future__ import annotations

from typing import Protocol, Self


class ObjectVersion(Protocol):
    """Identifies one version of an object."""

    @property
    def validator(self) -> str | None:
        """An identifier of these exact bytes; None if nothing proves that the bytes are equal."""

    @property
    def name(self) -> str | None:
        """A text that differs for other bytes, as in `ObjectInfo.etag`; None without a validator."""

    @property
    def size(self) -> int | None:
        """Bytes of the whole object; None if not stated."""

    def differs(self, other: Self) -> bool:
        """Return whether the two are certainly not the same version."""
        ...

    def proves(self, other: Self) -> bool:
        """Return whether the two are certainly the same version, byte for byte."""
        ...

    def resembles(self, other: Self) -> bool:
        """Return whether the store says that the two are the same version, if only by a weak validator."""
        ...
