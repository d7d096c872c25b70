"""Objects of the clouds' stores, ``s3://``, ``gs://`` and ``az://``. Data path: dataset -> [object store] -> sample.

`ObjectStoreTransport` is the contract of `base.py` on obstore, Rust's object_store for Python; below it lie, in
this order: `object_store_download` (one object over as many requests as it takes), `object_store_client`
(requests, listings), `object_store_session` (obstore's clients, by loop and process), and the pure
`object_store_trouble`. `object_store_config` finds credentials. What is the same for every network: `network`,
`download`, `client_owner`. Forks: `note_use` in `object_store_client`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Self

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.checks import check_prefix
from asyncloader.transports.download import NetworkTransport, check_limits
from asyncloader.transports.object_store_client import StoreClient, check_key
from asyncloader.transports.object_store_config import Settings, parse_location
from asyncloader.transports.object_store_download import StoreDownload, StoreVersion
from asyncloader.transports.retry import RetryPolicy

__all__ = ["ObjectStoreTransport"]


class ObjectStoreTransport(NetworkTransport[StoreClient]):
    """The objects below a prefix of a bucket. Failures that heal are retried (`retry`); `retries` counts them.

    *Retries.* Requests for objects are tried again here, by `RetryPolicy` as it stands: a budget of time since
    the last progress, and the count in `retries`. ``Retry-After`` is not seen, since obstore does not give it.
    The pages of listings are tried again by obstore, where `budget_s`, `first_delay_s` and `cap_s` are mapped
    (`budget_s` then counts for each page), `statuses` is not (408, 429 and all 5xx), and nothing is counted.

    *Ranges* are not read by obstore's own `get_ranges`, which neither says which version its bytes are of nor
    refuses a range that the object does not have.

    *Closing* drops the connections: obstore's threads close the idle ones a moment later, and stay themselves.

    *Checksums* of stores are not compared: obstore does not give them. TLS guards the way.

    *Forks.* A process that was forked from one that had used obstore, through any transport, gets a
    TransportError from its first call. See `object_store_client`.

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
    ) -> None:
        location = parse_location(root)
        check_limits(requests, connect_s=connect_s, stalled_s=stalled_s)
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
            "retry": RetryPolicy() if retry is None else retry,
            "requests": requests,
            "connect_s": connect_s,
            "stalled_s": stalled_s,
        }
        settings = Settings(**{name: options[name] for name in Settings.__slots__})
        super().__init__(StoreClient(location, settings, options["retry"], requests), root, options)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport for ``s3://...``, ``gs://...`` or ``az://...``; the options are the constructor's."""
        return cls(url, **options)

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
        version = StoreVersion.of(await self._client.meta(path))
        return ObjectInfo(version.size, version.validator)

    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> StoreDownload:
        return StoreDownload(self._client, path, start, length, max_bytes)
