"""What a download must know of the version of an object that an answer is of. Pure."""

from __future__ import annotations

from typing import Protocol, Self


class ObjectVersion(Protocol):
    """Identifies one version of an object."""

    @property
    def validator(self) -> str | None:
        """An identifier of these exact bytes; None if there is none."""

    @property
    def name(self) -> str | None:
        """A text that is another one for other bytes, as in `ObjectInfo.etag`; None if there is none."""

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
