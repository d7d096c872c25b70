"""Every error that a transport raises, by meaning. Off the data path: raised beside every read.

    LoaderError                     root of the package (`asyncloader.errors`)
    +-- TransportError              root of this family
        +-- UnknownScheme           no transport serves this URL (also a ValueError)
        +-- InvalidPath             not a legal path, or it leads out of the root (also a ValueError)
        +-- ObjectNotFound          nothing is stored under this path (also a FileNotFoundError)
        +-- AccessDenied            it exists, and we may not read it (also a PermissionError)
        +-- ObjectTooLarge          larger than the caller's `max_bytes` (also a ValueError)
        +-- RangeOutOfBounds        the range ends after the object does (also a ValueError)
        +-- ReadFailed              broken: the disk, server or network failed (also an OSError)
        |   +-- SizeUnknown         it can be read; how large it is, the store does not say
        +-- TransportClosed         closed: we ended it, by `aclose()` (also a RuntimeError)

Each error takes its message first and keeps what it is about as attributes. All of them pickle, and all can
be made from a message alone, which is how an error that a worker process met is raised again by the consumer.
"""

from __future__ import annotations

import errno
from typing import Any

from asyncloader.errors import LoaderError

__all__ = [
    "AccessDenied",
    "InvalidPath",
    "ObjectNotFound",
    "ObjectTooLarge",
    "RangeOutOfBounds",
    "ReadFailed",
    "SizeUnknown",
    "TransportClosed",
    "TransportError",
    "UnknownScheme",
]


class TransportError(LoaderError):
    """Root of the errors that transports raise.

    Attributes:
        path: the path that was asked for, None when the error is about no single path.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class UnknownScheme(TransportError, ValueError):
    """No transport is registered for the URL's scheme."""


class InvalidPath(TransportError, ValueError):
    """The path breaks the rules of `check_path`, or a link in it leads out of the transport's root."""


class ObjectNotFound(TransportError, FileNotFoundError):
    """Nothing that can be read is stored under this path. `errno` is ENOENT."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno.ENOENT


class AccessDenied(TransportError, PermissionError):
    """The store has it and does not let us read it. `errno` is EACCES."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno.EACCES


class ObjectTooLarge(TransportError, ValueError):
    """The object is larger than the caller allowed; nothing was allocated for it.

    Attributes:
        size: bytes that the object has, as far as they were counted; None when unknown.
        max_bytes: bytes that the caller allowed.
    """

    def __init__(
        self, message: str, *, path: str | None = None, size: int | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.size = size
        self.max_bytes = max_bytes


class RangeOutOfBounds(TransportError, ValueError):
    """The byte range ends after the object does; a short answer is never given.

    Attributes:
        size: bytes that the object has, None when the store did not say.
    """

    def __init__(self, message: str, *, path: str | None = None, size: int | None = None) -> None:
        super().__init__(message, path=path)
        self.size = size


class ReadFailed(TransportError, OSError):
    """The store broke while it was read. `__cause__` is the original error, `errno` its number if any."""

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own forgets an `errno` that was set afterwards.
        return type(self), self.args, {**vars(self), "errno": self.errno}


class SizeUnknown(ReadFailed):
    """The store gives the object, and does not say how large it is when asked for that."""


class TransportClosed(TransportError, RuntimeError):
    """The transport was closed by `aclose()` and cannot be used again."""
