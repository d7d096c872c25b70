"""Writes and deletes the objects of a store.

Data path: object_store -> [object_store_upload] -> object_store_client -> store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from typing_extensions import Buffer

from asyncloader.telemetry.counters import count
from asyncloader.transports.client_owner import Scope
from asyncloader.transports.errors import AccessDenied, ReadFailed, TransportError, WriteFailed
from asyncloader.transports.object_store_client import StoreClient
from asyncloader.transports.object_store_download import StoreVersion

PART_BYTES = 8 << 20
"""Bytes of a part of a multipart upload; an object that has no more is written by one request."""

MOST_PARTS = 10_000  # that S3 allows
PARTS_AT_ONCE = 8  # per object

_R = TypeVar("_R")


async def upload(client: StoreClient, path: str, pieces: Sequence[Buffer]) -> StoreVersion:
    """Write an object: by one request, or by a multipart upload that is completed at its end."""
    from obstore import put_async

    size = sum(memoryview(piece).nbytes for piece in pieces)
    part = max(PART_BYTES, -(-size // MOST_PARTS))

    async def step(scope: Scope) -> StoreVersion:  # noqa: ARG001 - obstore limits each request
        async with client.owner.slots:
            opened = client.owner.use()
            # obstore retries the parts by itself; not before the store has answered.
            store = opened.listings if client.reached else opened.objects
            count("requests")
            data = b"".join(pieces) if size <= part else iter(pieces)
            result = await put_async(store, path, data, chunk_size=part, max_concurrency=PARTS_AT_ONCE)
            client.answered()
            return StoreVersion(size, result["e_tag"])

    return await _until_done(client, path, step, "writing")


async def delete(client: StoreClient, path: str) -> None:
    """Delete an object, if it exists."""
    from obstore import delete_async

    async def step(scope: Scope) -> None:  # noqa: ARG001 - as above
        async with client.owner.slots:
            store = client.owner.use().objects
            count("requests")
            with suppress(FileNotFoundError):
                await delete_async(store, path)
            client.answered()

    await _until_done(client, path, step, "deleting")


async def _until_done(client: StoreClient, path: str, step: Callable[[Scope], Awaitable[_R]], action: str) -> _R:
    """Like `StoreClient.until_done`, whose errors say that an object could not be read."""
    try:
        return await client.until_done(path, step)
    except (ReadFailed, AccessDenied) as error:
        raise _write_error(error, action) from error.__cause__


def _write_error(error: ReadFailed | AccessDenied, action: str) -> TransportError:
    text = str(error)
    if isinstance(error, AccessDenied):
        return AccessDenied(text.replace("no permission to read", f"no permission for {action}", 1), path=error.path)
    failed = WriteFailed(action + text.removeprefix("reading"), path=error.path)
    failed.errno = error.errno
    return failed
