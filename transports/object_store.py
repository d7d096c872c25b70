"""Objects of the clouds' stores, ``s3://``, ``gs://`` and ``az://``. Data path: dataset -> [object store] -> sample.

`ObjectStoreTransport` is the contract of `base.py` on obstore, Rust's object_store for Python; below it lie, in
this order: `object_store_download` (one object over as many requests as it takes), `object_store_client`
(requests, listings, retries), `object_store_session` (obstore's client, by loop and process), and the pure
`object_store_trouble`. `object_store_config` finds credentials. Forks: `fork_hazard`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Self

from asyncloader.transports.base import ObjectInfo, Transport
from asyncloader.transports.checks import check_chunk_size, check_prefix, check_size, check_start
from asyncloader.transports.errors import ReadFailed
from asyncloader.transports.object_store_client import StoreClient, check_key
from asyncloader.transports.object_store_config import Settings, parse_place
from asyncloader.transports.object_store_download import Download, strong_etag
from asyncloader.transports.retry import RetryCounts, RetryPolicy

__all__ = ["ObjectStoreTransport"]


class ObjectStoreTransport(Transport):
    """The objects below a prefix of a bucket. Failures that heal are retried (`retry`); `retries` counts them.

    *Retries.* Requests for objects are tried again here, by `RetryPolicy` as it stands: a budget of time since
    the last progress, and the count in `retries`. ``Retry-After`` is not seen, since obstore does not give it.
    The pages of listings are tried again by obstore, where `budget_s`, `first_delay_s` and `cap_s` are mapped
    (`budget_s` then counts for each page), `statuses` is not (408, 429 and all 5xx), and nothing is counted.

    *Checksums* of stores are not compared: obstore does not give them. TLS guards the way.

    *Forks.* A process that was forked from one that had used obstore, through any transport, gets a
    TransportError from its first call. See `fork_hazard`.

    Args:
        root: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``. Also ``s3a://``, and for
            Azure ``azure://``, ``adl://``, and ``abfs://`` and ``abfss://`` with ``container@account...`` or not.
        endpoint: the store's address, for one that is not the cloud's own: ``https://minio.example:9000``. With
            ``http://`` all goes unencrypted. None: what the environment says, else the cloud's.
        region: S3's region. None: what the environment or the AWS profile says, else ``us-east-1``.
        skip_signature: send no credentials, for public buckets. Default False.
        credentials: an obstore credential provider, for example ``obstore.auth.boto3.Boto3CredentialProvider()``;
            must pickle if the transport is to. None: the standard places (`object_store_config`).
        config: more settings by obstore's names (``S3Config``, ``GCSConfig``, ``AzureConfig``), which override all
            others: ``{"access_key_id": ..., "secret_access_key": ...}``. Not shown in texts.
        client: more settings of the connections by obstore's names (``ClientConfig``): proxies, own certificates.
        retry: what is tried again and for how long. Default: `RetryPolicy()`.
        requests: requests in progress at most, and so connections; an open stream is one. Default 256.
        connect_s: seconds for the store to accept a connection. Default 10.
        stalled_s: seconds without one more byte, of the answer's head or body, after which it counts as broken.
            Default 30. There is no limit to a whole download.

    Raises:
        ValueError: the URL is none of an object store, an option does not fit it, or a number is out of bounds.
        InvalidPath: the prefix is not canonical.
    """

    def __init__(
        self,
        root: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        skip_signature: bool = False,
        credentials: Callable[[], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        client: Mapping[str, Any] | None = None,
        retry: RetryPolicy | None = None,
        requests: int = 256,
        connect_s: float = 10.0,
        stalled_s: float = 30.0,
    ) -> None:
        place = parse_place(root)
        if requests < 1:
            raise ValueError(f"requests must be at least 1, got {requests}")
        for name, seconds in {"connect_s": connect_s, "stalled_s": stalled_s}.items():
            if not (isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be above 0 seconds, got {seconds}")
        if region is not None and place.kind != "s3":
            raise ValueError(f"region={region!r} does not fit {place.url}: only s3:// has regions")
        if endpoint is not None and not endpoint.lower().startswith(("http://", "https://")):
            raise ValueError(f"endpoint must be an http or https URL, got {endpoint!r}")
        self._root = root
        self._options: dict[str, Any] = {
            "endpoint": endpoint,
            "region": region,
            "skip_signature": skip_signature,
            "credentials": credentials,
            "config": dict(config or {}),
            "client": dict(client or {}),
            "retry": RetryPolicy() if retry is None else retry,
            "requests": requests,
            "connect_s": connect_s,
            "stalled_s": stalled_s,
        }
        settings = {name: self._options[name] for name in Settings.__slots__}
        self._client = StoreClient(place, Settings(**settings), self._options["retry"], requests)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport for ``s3://...``, ``gs://...`` or ``az://...``; the options are the constructor's."""
        return cls(url, **options)

    def __repr__(self) -> str:
        state = "closed" if self._client.owner.closed else "open"
        return f"<ObjectStoreTransport {self._client.place.url!r} requests={self._options['requests']} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return partial(type(self), **self._options), (self._root,)

    @property
    def retries(self) -> RetryCounts:
        """What was tried again so far, by this transport in this process; without listings."""
        return self._client.counts

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object; a download that breaks is resumed. As `Transport.read`."""
        return (await self.read_with_info(path, max_bytes=max_bytes))[0]

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version in one request. As `Transport.read_with_info`."""
        check_key(path)
        check_size(path, 0, max_bytes)
        download = Download(self._client, path, max_bytes=max_bytes)
        data = await download.rest()
        return data, download.info or ObjectInfo(len(data), None)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range. As `Transport.read_range`."""
        check_key(path)
        if start < 0 or length < 0:
            raise ValueError(f"a byte range needs start and length of 0 or more, got start={start}, length={length}")
        if not length:
            self._client.owner.use()
            return b""
        return await Download(self._client, path, start, length).rest()

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, near ones in one request, all of one version of the object. As `Transport.read_ranges`.

        Not by obstore's own `get_ranges`, which neither says which version its bytes are of nor refuses a range
        that the object does not have.

        Raises:
            ReadFailed: also when the object changed between the requests.
        """
        check_key(path)
        plan = self._plan(ranges)
        self._client.owner.use()
        slots = asyncio.Semaphore(self.range_requests)
        downloads = [Download(self._client, path, *block) for block in plan.blocks]

        async def fetch(download: Download) -> bytes:
            async with slots:
                return await download.rest()

        if len(downloads) <= 1:
            return plan.cut([await download.rest() for download in downloads])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch(download)) for download in downloads]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        if len({download.info for download in downloads}) > 1:
            raise ReadFailed(
                f"{path!r} in {self._client.place.url} changed between the requests for its parts; read it again, and "
                "write objects under new names instead of replacing them",
                path=path,
            )
        return plan.cut([task.result() for task in tasks])

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks as they arrive; a download that breaks is resumed. As `Transport.stream`."""
        check_key(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        download = Download(self._client, path, start)
        try:
            while chunk := await download.part(chunk_size):
                yield chunk
        finally:
            download.close()

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Give the objects' paths; all are asked for before the first is given. As `Transport.list`.

        Costs one request for each 1,000 objects in the directory that `prefix` names or begins in, and memory
        for the matching names.

        Raises:
            InvalidPath: also when an object's name is no path (``a//b``): obstore then lists nothing at all.
        """
        check_prefix(prefix)
        for path in await self._client.names(prefix):
            yield path
            self._client.owner.use()

    async def size(self, path: str) -> int:
        """Give an object's size, by HEAD. As `Transport.size`."""
        return (await self.info(path)).size

    async def info(self, path: str) -> ObjectInfo:
        """Give an object's size and its ETag if that is strong, by HEAD. As `Transport.info`."""
        check_key(path)
        meta = await self._client.meta(path)
        return ObjectInfo(meta["size"], strong_etag(meta["e_tag"]))

    async def aclose(self) -> None:
        """End calls in progress with TransportClosed, and drop the connections. As `Transport.aclose`.

        obstore's threads close the idle connections a moment later, and stay themselves.
        """
        await self._client.owner.aclose()
