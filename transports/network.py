"""What the transports that reach over a network share. Data path: dataset -> [transport] -> download -> server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from asyncloader.transports.base import ObjectInfo, Transport
from asyncloader.transports.checks import check_chunk_size, check_path, check_size, check_start
from asyncloader.transports.download import read_blocks
from asyncloader.transports.retrying_client import RetryingClient

if TYPE_CHECKING:
    from asyncloader.transports.download import Download
    from asyncloader.transports.retry import RetryCounts

__all__ = ["NetworkTransport", "check_limits"]

_K = TypeVar("_K", bound=RetryingClient[Any])


class NetworkTransport(Transport, Generic[_K]):
    """A transport whose objects are read by downloads that are tried again; `retries` counts that.

    Args:
        client: sends the requests.
        root: the URL as it was given, and the first argument of the subclass's constructor.
        options: its other arguments, by name.
    """

    # Refuses a path that cannot be an object's here, with InvalidPath.
    _check = staticmethod(check_path)

    def __init__(self, client: _K, root: str, options: Mapping[str, Any]) -> None:
        self._client = client
        self._root = root
        self._options = options

    def __repr__(self) -> str:
        state = "closed" if self._client.owner.closed else "open"
        return f"<{type(self).__name__} {self._client.where(None)!r} requests={self._options['requests']} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return partial(type(self), **self._options), (self._root,)

    @property
    def retries(self) -> RetryCounts:
        """What was tried again so far, by this transport in this process."""
        return self._client.counts

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object; a download that breaks is resumed. As `Transport.read`."""
        self._check(path)
        check_size(path, 0, max_bytes)
        return await self._download(path, max_bytes=max_bytes).rest()

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version in one request. As `Transport.read_with_info`."""
        self._check(path)
        check_size(path, 0, max_bytes)
        download = self._download(path, max_bytes=max_bytes)
        data = await download.rest()
        return data, ObjectInfo(len(data), download.version and download.version.validator)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range. As `Transport.read_range`."""
        self._check(path)
        if start < 0 or length < 0:
            raise ValueError(f"a byte range needs start and length of 0 or more, got start={start}, length={length}")
        if not length:
            self._client.owner.use()
            return b""
        return await self._download(path, start, length).rest()

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, near ones in one request, all of one version of the object. As `Transport.read_ranges`.

        Raises:
            ReadFailed: also when the object changed between the requests.
        """
        self._check(path)
        plan = self._plan(ranges)
        self._client.owner.use()
        downloads = [self._download(path, block.start, block.length) for block in plan.blocks]
        return plan.cut(await read_blocks(self._client, path, downloads, self.range_requests))

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks as they arrive; a download that breaks is resumed. As `Transport.stream`.

        Raises:
            ReadFailed: also when it breaks, and the server sends no strong ETag by which to resume.
        """
        self._check(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        download = self._download(path, start)
        try:
            while chunk := await download.part(chunk_size):
                yield chunk
        finally:
            download.close()

    async def aclose(self) -> None:
        """End calls in progress with TransportClosed, and close the connections. As `Transport.aclose`."""
        await self._client.owner.aclose()

    @abstractmethod
    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> Download[_K, Any]:
        """Make a download with this transport's client; `path` has been checked. As `Download`."""


def check_limits(requests: int, **seconds: float) -> None:
    """Refuse what cannot be a limit of the requests in progress, or of a wait.

    Raises:
        ValueError: `requests` is below 1, or one of the `seconds` is not above 0 and finite.
    """
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    for name, each in seconds.items():
        if not (isfinite(each) and each > 0):
            raise ValueError(f"{name} must be above 0 seconds, got {each}")
