"""`ObjectStoreTransport`: reads and writes objects of ``s3://``, ``gs://`` and ``az://``.

Data path: dataset -> [object_store] -> object_store_client -> obstore -> store.

It is implemented on obstore, the Python binding of Rust's object_store. `object_store_client` sends requests, lists,
handles forks and classifies errors; `object_store_config` finds credentials. HTTP uses `download`, `network_client` and
`retry`, too.

A broken download continues with a range and ``If-Match``, if the store sent a strong ETag, as S3, GCS and Azure do.
obstore could retry by itself, but its retries are disabled for objects: it would not count them, its time limit would
elapse while a stream's consumer is busy, and it would report a changed object as a broken one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.checks import check_limits, check_prefix, check_size, check_start
from asyncloader.transports.download import Download, NetworkTransport
from asyncloader.transports.network_client import Scope
from asyncloader.transports.object_store_client import StoreClient, check_key, status_of
from asyncloader.transports.object_store_config import parse_location
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed, RetryPolicy

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta


# A body of up to this size is read in one await. A larger body is read in parts, so that it can be resumed.
_SMALL = 1 << 20
_PART = 1 << 20


class ObjectStoreTransport(NetworkTransport[StoreClient]):
    """The objects below a prefix of a bucket. Retryable failures are retried (see `retry`) and counted in `retries`.

    *Retries.* Requests for objects are retried here, exactly by `RetryPolicy`: with a budget of time since the last
    progress, and counted in `retries`. ``Retry-After`` is ignored, because obstore does not provide it. The pages of
    listings are retried by obstore, with `budget_s`, `first_delay_s` and `cap_s` mapped to its options (`budget_s` then
    applies per page), but not `statuses` (obstore retries 408, 429 and all 5xx); these retries are not counted.

    *Ranges* are not read by obstore's own `get_ranges`, which neither returns the version of its bytes nor refuses a
    range beyond the object's end.

    *Closing* drops the connections: obstore's threads close the idle ones a moment later; the threads remain.

    *Checksums* of stores are not compared, because obstore does not provide them. TLS protects the transfer.

    *Forks.* In a process that was forked after obstore was used, through any transport, the first call raises
    TransportError. See `object_store_client`.

    Args:
        root: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``. Also ``s3a://``, and for Azure
            ``azure://``, ``adl://``, and ``abfs://`` and ``abfss://`` with or without ``container@account...``.
        endpoint: the store's address, if it is not the cloud's own: ``https://minio.example:9000``. With ``http://``
            nothing is encrypted. None: from the environment, otherwise the cloud's own.
        region: S3's region. None: from the environment or the AWS profile, otherwise ``us-east-1``.
        skip_signature: send no credentials, for public buckets. Default False.
        credentials: an obstore credential provider, for example ``obstore.auth.boto3.Boto3CredentialProvider()``; must
            be picklable if the transport is pickled. None: the standard sources (`object_store_config`).
        config: more settings by obstore's names (``S3Config``, ``GCSConfig``, ``AzureConfig``), which override all
            others: ``{"access_key_id": ..., "secret_access_key": ...}``. Not shown in texts.
        client: more settings of the connections by obstore's names (``ClientConfig``): proxies, own certificates.
        retry: which failures are retried and for how long. Default: `RetryPolicy()`.
        requests: maximum number of concurrent requests, and so of connections; an open stream is one. Default 256.
        connect_s: seconds for the store to accept a connection. Default 10.
        stalled_s: seconds without new bytes, of the response's head or body, after which it counts as broken. Default
            30. There is no limit for a whole download.
        min_bytes_per_s: a response that is slower counts as broken, too: a part of up to 1 MiB, which obstore gives as
            a whole, must come within a minute, or within the time that this rate allows, if that is more. Default
            1024; 0: no least rate.

    Raises:
        TypeError: `retry` is no policy, or a number is none.
        ValueError: the URL is not an object store's, an option does not apply to it, or a number is out of bounds.
        InvalidPath: the prefix is not canonical.
    """

    _check = staticmethod(check_key)

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
        min_bytes_per_s: float = 1024.0,
    ) -> None:
        location = parse_location(root)
        check_limits(requests, min_bytes_per_s, connect_s=connect_s, stalled_s=stalled_s)
        if region is not None and location.kind != "s3":
            raise ValueError(f"region={region!r} does not fit {location.url}: only s3:// has regions")
        if endpoint is not None and not endpoint.lower().startswith(("http://", "https://")):
            raise ValueError(f"endpoint must be an http or https URL, got {endpoint!r}")
        options: dict[str, Any] = {
            "endpoint": endpoint,
            "region": region,
            "skip_signature": skip_signature,
            "credentials": credentials,
            "config": dict(config or {}),
            "client": dict(client or {}),
            "retry": RetryPolicy.of(retry),
            "requests": requests,
            "connect_s": connect_s,
            "stalled_s": stalled_s,
            "min_bytes_per_s": min_bytes_per_s,
        }
        super().__init__(StoreClient(location, options), root, options)

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the objects' paths, like `Transport.list`. All are requested before the first is returned.

        Costs one request per 1,000 objects in the directory that `prefix` names or lies in, and memory for the matching
        names.

        Raises:
            InvalidPath: also if an object's name is not a valid path (``a//b``): obstore then lists nothing at all.
        """
        check_prefix(prefix)
        for path in await self._client.names(prefix):
            yield path
            self._client.use()

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        """Write an object, like `Transport.write`: up to 8 MiB by one request, more by a multipart upload.

        A part that the store does not answer within `stalled_s` is sent again. A killed or cancelled multipart upload
        leaves parts that no reader sees, and that the store charges for: a lifecycle rule of the bucket can delete
        them.
        """
        check_key(path)
        version = await self._client.upload(path, pieces)
        return ObjectInfo(sum(memoryview(piece).nbytes for piece in pieces), version.name)

    async def delete(self, path: str) -> None:
        """Delete an object, like `Transport.delete`."""
        check_key(path)
        await self._client.delete(path)

    async def version(self, path: str) -> Version:
        """Return an object's version, by HEAD."""
        check_key(path)
        meta = await self._client.meta(path)
        return Version(meta["e_tag"], size=meta["size"])

    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> StoreDownload:
        return StoreDownload(self._client, path, start, length, max_bytes)


class StoreDownload(Download[StoreClient]):
    """One object of an object store, or one range of it. The arguments are those of `Download`."""

    def __init__(
        self, client: StoreClient, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__(client, path, start, length, max_bytes)
        self._body: AsyncIterator[bytes] | None = None
        self._spare = b""  # bytes received beyond those that the caller asked for

    def _classify_error(self, error: BaseException) -> RequestFailed | None:
        failed = self._client.classify_error(error, self._path)
        if isinstance(error, TimeoutError) and self._body is not None:
            text = f"the answer was slower than min_bytes_per_s={self._client.min_bytes_per_s:g}"
            return RequestFailed("slow", text, cause=error)
        if failed is not None and failed.kind == "status 412":
            changed = self._changed_error()
            if isinstance(changed, RequestFailed):
                return changed
            return RequestFailed(failed.kind, failed.text, retryable=False, cause=error, final=changed)
        return failed

    def _drop(self) -> None:
        self._body = None
        self._spare = b""

    async def _read_all(self, scope: Scope) -> None:
        if self._attempts is None:
            await self._read_small(scope)
        await super()._read_all(scope)

    async def _read_small(self, scope: Scope) -> None:
        """Read a small body in one await: half the round trips to obstore's threads."""
        result = await self._open(scope)
        if result is None:
            return
        assert self._end is not None
        if self._end - self._position > _SMALL:
            self._body = aiter(result.stream(_PART))
            return
        scope.limit(self._client.slow_s(self._end - self._position))
        data = (await result.bytes_async()).to_bytes()[: self._end - self._position]
        scope.limit(None)
        if self._position + len(data) != self._end:
            raise RequestFailed.short(self._position + len(data), self._end)
        self._advance(len(data))
        self._parts.append(data)
        self._finish()

    async def _next(self, scope: Scope, most: int) -> bytes:
        """Return the next bytes, at most `most` (0: as they arrive); none at the end."""
        if self._done:
            return b""
        if self._body is None:
            result = await self._open(scope)
            if result is None:
                return b""
            # obstore returns parts of at least the size asked for, often larger: with half of `most`, they seldom
            # exceed `most`.
            self._body = aiter(result.stream(max(1, most // 2) if most else _PART))
        data, self._spare = self._spare, b""
        # obstore returns a part when it has all of its bytes, so that only a limit can end the wait for a slow store.
        slow_s = self._client.slow_s(most or _PART)
        while not data:
            scope.limit(slow_s)
            try:
                data = self._drop_skipped(await self._wait(anext(self._body), slow_s or inf))
            except StopAsyncIteration:
                raise RequestFailed.short(self._position, self._end or 0) from None
        scope.limit(None)
        end = self._end if self._until is None else self._until
        assert end is not None
        data = data[: end - self._position]  # the body may be longer than its head states
        if most and len(data) > most:
            data, self._spare = data[:most], data[most:]
        self._advance(len(data))
        self._end_response()
        return data

    async def _open(self, scope: Scope) -> GetResult | None:
        """Take a slot and request the remaining bytes; None if nothing is left."""
        await self._take_slot()
        options: GetOptions = {}
        first, end = self._position, self._asked_end()
        if end is not None and (self._length is not None or first or end != self._end):
            options["range"] = (first, end)
        elif first:
            options["range"] = {"offset": first}
        if first > self._start and self.version is not None:
            options["if_match"] = self.version.validator
        try:
            result = await self._client.get(scope, self._path, options)
        except Exception as error:
            if status_of(error) != 416:
                raise
            await self._accept_nothing(scope, error)
            return None
        try:
            if self._accept(result.meta, result.range):
                return result
        except BaseException:
            # Takes the body out and drops it. Dropping `result` is not enough: the error's traceback may keep it alive,
            # and obstore's threads release their part of it only at their next call.
            result.stream()
            raise
        self._finish()
        return None

    def _accept(self, meta: ObjectMeta, given: tuple[int, int]) -> bool:
        """Check the head of a response; False if nothing is left to read."""
        size = meta["size"]
        first = self._position
        self._check_version(first, Version(meta["e_tag"], size=size))
        if self._length is not None:
            assert self._end is not None
            if self._end > size:
                raise self._out_of_bounds(size)
        else:
            check_size(self._path, size, self._max_bytes)
            check_start(self._path, size, self._start)
            self._end = size
        end = self._asked_end()
        assert end is not None
        if given != (first, end):
            raise RequestFailed("wrong range", f"bytes {first:,} to {end:,} were asked for, not {given}")
        self._until = end if end < self._end else None
        return self._position < self._end

    async def _accept_nothing(self, scope: Scope, error: Exception) -> None:
        """Interpret a response that has no bytes from the position on."""
        if self._position > self._start:
            raise self._changed_error() from error
        if self._length is not None:
            raise self._out_of_bounds(None) from error
        meta = await self._client.head(scope, self._path)
        check_start(self._path, meta["size"], self._start)
        if meta["size"] > self._start:
            raise RequestFailed(
                "status 416", f"bytes from {self._start:,} on were asked for, and it has {meta['size']:,}"
            )
        self._finish()  # the stream begins where the object ends
