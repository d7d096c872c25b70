"""The errors that transports raise.

    LoaderError                     root of the package (`asyncloader.errors`)
    +-- TransportError              root of this family
        +-- UnknownScheme           no transport serves this URL (also a ValueError)
        +-- InvalidPath             not a legal path, or it leads out of the root (also a ValueError)
        +-- ObjectNotFound          no object has this path (also a FileNotFoundError)
        +-- AccessDenied            no permission to read it (also a PermissionError)
        +-- ObjectTooLarge          larger than the caller's `max_bytes` (also a ValueError)
        +-- RangeOutOfBounds        the range ends after the object does (also a ValueError)
        +-- ReadFailed              the disk, server or network failed (also an OSError)
        |   +-- RangesIgnored       the server has no byte ranges, and the range lies far inside the object
        |   +-- SizeUnknown         it can be read, but the store does not provide its size
        +-- WriteFailed             writing failed, or the store is for reading only (also an OSError)
        +-- TransportClosed         the transport was closed by `aclose()` (also a RuntimeError)

*Bad samples and transport errors.* Some errors are about the object: it is missing, has an illegal name, or is larger
or smaller than it should be. `on_error` may leave out its sample (`about_sample`). All other errors say that the object
could not be read, and nothing about the object: they are raised, whatever `on_error` is.

Each error takes its message first and has the details as attributes. All errors pickle, and can be constructed from a
message alone: so the consumer can raise the error of a worker process again.
"""

from __future__ import annotations

import errno
from math import inf
from time import monotonic
from typing import Any

from asyncloader.errors import LoaderError


class TransportError(LoaderError):
    """Base class of the errors that transports raise.

    Attributes:
        path: the requested path; None if the error concerns no single path.
        about_sample: whether the error is about the object, so that `on_error` may leave out its sample.
        made_at: when it was made, by `time.monotonic`: an error of a read ahead may be raised much later.
    """

    about_sample: bool = False
    made_at: float = inf  # for a subclass that does not call `__init__`

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.made_at = monotonic()


class UnknownScheme(TransportError, ValueError):
    """No transport is registered for the URL's scheme."""


class InvalidPath(TransportError, ValueError):
    """The path breaks the rules of `check_path`, or a link in it leads out of the transport's root."""

    about_sample = True


class ObjectNotFound(TransportError, FileNotFoundError):
    """No readable object has this path. `errno` is ENOENT."""

    about_sample = True

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno.ENOENT


class AccessDenied(TransportError, PermissionError):
    """The store does not allow the read or the write. `errno` is EACCES."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno.EACCES


class ObjectTooLarge(TransportError, ValueError):
    """The object is larger than the caller allowed; no memory was allocated for it.

    Attributes:
        size: bytes of the object, or bytes that were read before the error; None if unknown.
        max_bytes: bytes that the caller allowed.
    """

    about_sample = True

    def __init__(
        self, message: str, *, path: str | None = None, size: int | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.size = size
        self.max_bytes = max_bytes


class RangeOutOfBounds(TransportError, ValueError):
    """The byte range ends after the object does; transports never return fewer bytes than requested.

    Attributes:
        size: bytes of the object; None if the store did not state it.
    """

    about_sample = True

    def __init__(self, message: str, *, path: str | None = None, size: int | None = None) -> None:
        super().__init__(message, path=path)
        self.size = size


class ReadFailed(TransportError, OSError):
    """Reading from the store failed. `__cause__` is the original error, `errno` its number if it has one."""

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError.__reduce__ loses an `errno` that was set after construction.
        return type(self), self.args, {**vars(self), "errno": self.errno}


class WriteFailed(TransportError, OSError):
    """Writing to the store failed: no part of the object is visible. `__cause__` and `errno` as in `ReadFailed`."""

    __reduce__ = ReadFailed.__reduce__


class RangesIgnored(ReadFailed):
    """The server ignores byte ranges, and the range lies far inside the object: most of the answer would be dropped. A
    stream reads it nevertheless.
    """


class SizeUnknown(ReadFailed):
    """The store provides the object, but not its size."""


class TransportClosed(TransportError, RuntimeError):
    """The transport was closed by `aclose()` and cannot be used again."""
