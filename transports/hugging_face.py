"""`HuggingFaceTransport`: reads the files of datasets on the Hugging Face Hub, ``hf://datasets/...``.

Data path: dataset -> [hugging_face] -> http_client -> the Hub -> its CDN.

A revision is resolved to its commit once, and everything is read from that commit. Files are read from the Hub's
``resolve`` addresses, which redirect to a CDN: requests, retries and the rule that credentials go to the Hub alone are
those of `http_client`. The token is found by `huggingface_hub`, before each request to the Hub; nothing here keeps it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from asyncloader.base.bridge import in_thread
from asyncloader.transports.checks import check_prefix
from asyncloader.transports.errors import AccessDenied, ObjectNotFound, ReadFailed, TransportError
from asyncloader.transports.http import HttpDownload, HttpTransport
from asyncloader.transports.http_answers import Headers, status_error
from asyncloader.transports.http_client import HttpClient
from asyncloader.transports.hub_names import (
    HubDataset,
    commit_of,
    files_of,
    is_no_dataset,
    limited_delay,
    next_target,
    reason_of,
)
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed, RetryPolicy

if TYPE_CHECKING:
    from yarl import URL

    from asyncloader.transports.http_client import Response

_MOST_PAGES = 4096  # of a listing: of four million files
_MAX_PAGE_BYTES = 64 << 20  # of a listing: some hundred times the largest that the Hub sends

_BUDGET_S = 330.0
"""The Hub counts requests over five minutes, and refuses those beyond the number until the five minutes are over."""

_REDIRECT_S = 300.0  # for how long a redirect is used again: the CDN's addresses are valid for an hour
_MOST_REDIRECTS = 4096


class HubClient(HttpClient):
    """Requests to the Hub. Paths are those of the dataset's files; targets of the API begin with ``/``."""

    dataset: HubDataset

    encoding_advice = "a proxy between may have encoded them"
    asks_if_range = False  # the CDN knows nothing of commits

    def __init__(self, root: str, options: Mapping[str, Any], range_gap: int) -> None:
        super().__init__(root, options, range_gap)
        self._redirects: dict[str, tuple[URL, float]] = {}
        self._resolving: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @property
    def address(self) -> str:
        """The Hub's address, without an end."""
        return self._base.removesuffix("/")

    def url(self, path: str) -> str:
        """Return the address of a file, or of a target."""
        if path.startswith("/"):
            return self.address + path
        # Of a file's name all is escaped: "?" and "#" are characters of it, and surrogates stand for bytes.
        return self._base + self.dataset.folder + quote(path, errors="surrogateescape")

    async def request(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Send a request, like `HttpClient.request`; to the CDN at once, where the Hub has redirected to it lately. The
        Hub counts requests, and an answer of it takes as long as one of the CDN.
        """
        target, since = self._redirects.get(path, (None, 0.0))
        if target is not None and monotonic() - since < _REDIRECT_S:
            try:
                response = await self.follow(method, path, target, headers)
            except Exception:
                self._redirects.pop(path, None)  # a server of the CDN that has gone: the next request asks the Hub
                raise
            # A server that limits requests asks the client to wait, and not to make more of them.
            if response.status in {200, 206, 416, 429}:
                return response
            response.release()  # its signature is no longer valid, perhaps: the Hub is asked for another
        self._redirects.pop(path, None)
        response = await super().request(method, path, headers)
        if response.status in {200, 206} and not self.is_own(response.url):
            if len(self._redirects) >= _MOST_REDIRECTS:
                self._redirects.clear()
            self._redirects[path] = response.url, monotonic()
        return response

    def bad_status(self, path: str, response: Response) -> RequestFailed:
        """Classify a response, like `HttpClient.bad_status`; the Hub says in headers of its own when to come again, and
        why it refuses a request.
        """
        failed = super().bad_status(path, response)
        if failed.retry_after is None and response.status == 429:
            failed.retry_after = limited_delay(response.headers)
        if response.status in {401, 403, 404} and self.is_own(response.url):
            notes = [reason_of(response.headers)]
            if response.status != 404 and not path.startswith("/"):  # `resolve` says it of its target
                notes.append(_token_advice())
            note = "; ".join(filter(None, notes))
            failed.final = status_error(response.status, response.reason, str(response.url), path, note)
        return failed

    def version_of(self, headers: Headers, size: int | None) -> Version:  # noqa: ARG002 - of any header
        """Return the version of a file, like `HttpClient.version_of`: its commit. The CDN's servers may describe one
        file by different headers.
        """
        return Version(f'"{self.dataset.revision}"', size=size)

    async def resolve(self) -> None:
        """Have `dataset` be of a commit.

        Raises:
            TransportError: the Hub knows no such revision, or cannot be asked.
        """
        if self.dataset.pinned:
            return
        loop = asyncio.get_running_loop()
        if self._resolving is None or self._resolving[0] is not loop:
            self._resolving = loop, asyncio.Lock()
        async with self._resolving[1]:
            if self.dataset.pinned:
                return
            target = self.dataset.revision_target
            try:
                answer = await HttpDownload(self, target, max_bytes=_MAX_PAGE_BYTES).rest()
            except (AccessDenied, ObjectNotFound) as error:
                raise type(error)(
                    f"{self.dataset.url} cannot be read: the Hub has no such dataset or revision, or gives it to "
                    f"others only ({_token_advice()}). {error}"
                ) from error
            # In a thread: the answer names all files, too.
            commit = await in_thread(partial(commit_of, answer, self.where(target)))
            self.dataset = self.dataset._replace(revision=commit)


class HubDownload(HttpDownload):
    """A file of a dataset. See `HttpDownload`."""

    async def _take_slot(self) -> None:
        # Before the slot: resolving takes one, too.
        await cast("HubClient", self._client).resolve()
        await super()._take_slot()


class HubPage(HttpDownload):
    """A page of a listing.

    Attributes:
        link: the header that names the next page.
        no_dataset: whether the answer was that the dataset or its commit does not exist.
    """

    link: str | None = None
    no_dataset = False

    def _accept(self, response: Response) -> bool:
        self.link = response.headers.get("Link")
        self.no_dataset = is_no_dataset(response.headers)
        return super()._accept(response)


class HuggingFaceTransport(HttpTransport):
    """The files of a dataset on the Hugging Face Hub. See `HttpTransport` for what is common.

    A branch or a tag is resolved to its commit with the first read, once for each transport and process, and everything
    is read from that commit. A `RemoteIterableDataset` resolves it when it plans, so that all of its workers read one
    commit; several ranks, and a run that is resumed, do so for certain if the URL names the commit.

    A private or gated dataset needs a token, which `huggingface_hub` finds: ``HF_TOKEN``, or what `hf auth login` has
    written. It is sent to the Hub only, and never stored, pickled or shown.

    Args:
        root: ``hf://datasets/OWNER/NAME``, ``hf://datasets/OWNER/NAME@REVISION``. A ``/`` in a revision is ``%2F``.
        endpoint: the Hub's address. None: ``HF_ENDPOINT``, or https://huggingface.co.
        retry: as for `HttpTransport`; by default retried for 330 seconds, because the Hub's limit on requests is for
            five minutes. It is followed as ``Retry-After`` and ``RateLimit`` say.
        requests: maximum number of concurrent requests. Default 64.
        limits: `connect_s`, `first_byte_s`, `stalled_s`, `min_bytes_per_s`: as for `HttpTransport`.

    Raises:
        TypeError: `retry` is no policy, or a number is none.
        ValueError: the URL is not of a dataset, or a number is out of bounds.
        TransportError: `huggingface_hub` is not installed.
    """

    _client_type = HubClient

    def __init__(
        self,
        root: str,
        *,
        endpoint: str | None = None,
        retry: RetryPolicy | None = None,
        requests: int = 64,
        **limits: Any,
    ) -> None:
        dataset, path = HubDataset.split(root)
        if path.strip("/"):
            raise ValueError(f"{root!r} is not the root of a dataset; pass {path!r} to the calls")
        if "token" in limits:  # its value is not repeated
            raise TypeError("token is not an option of hf://: set HF_TOKEN, or run `hf auth login`")
        if refused := limits.keys() & {"headers", "listing", "encoded"}:
            raise TypeError(f"{min(refused)} is not an option of hf://")
        if not isinstance(endpoint, str | None):
            raise TypeError(
                f"endpoint={endpoint!r} is no address: give a string such as 'https://huggingface.co', or None for "
                "HF_ENDPOINT"
            )
        hub_headers()  # raises if huggingface_hub is missing
        own: dict[str, Any] = {"endpoint": endpoint, "retry": retry, "requests": requests, **limits}
        retry = RetryPolicy(budget_s=_BUDGET_S) if retry is None else retry
        super().__init__(endpoint or hub_address(), headers=hub_headers, retry=retry, requests=requests, **limits)
        self._root, self._options = root, own
        self._hub = cast("HubClient", self._client)
        self._hub.dataset = dataset
        self._sizes: dict[str, int] = {}

    async def pinned_root(self) -> str:
        """Return the URL of the dataset at its commit, like `Transport.pinned_root`."""
        await self._hub.resolve()
        return self._hub.dataset.url

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the paths of the files at the commit, ascending, like `Transport.list`."""
        check_prefix(prefix)
        self._client.use()
        await self._hub.resolve()
        folder = prefix.rpartition("/")[0]
        target: str | None = self._hub.dataset.tree_target(folder)
        found: set[str] = set()
        seen: set[str] = set()
        while target is not None:
            where = self._client.where(target)
            if target in seen or len(seen) >= _MOST_PAGES:
                raise ReadFailed(
                    f"the listing of {self._hub.dataset.url} does not end: "
                    + (f"{where} comes again" if target in seen else f"it has more than {_MOST_PAGES:,} pages")
                )
            seen.add(target)
            page = HubPage(self._client, target, max_bytes=_MAX_PAGE_BYTES)
            try:
                files = await in_thread(partial(files_of, await page.rest(), where))
            except ObjectNotFound:
                if not folder or page.no_dataset or len(seen) > 1:
                    raise
                break  # the commit exists, and the folder does not: of a folder that exists all pages do
            self._sizes.update(files)
            found.update(path for path, _ in files if path.startswith(prefix))
            target = next_target(page.link, self._hub.address, where)
        for path in await in_thread(partial(sorted, found)):
            yield path
            self._client.use()

    def listed_size(self, path: str) -> int | None:
        """Return a file's size as `list` has found it, like `Transport.listed_size`."""
        return self._sizes.get(path)

    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> HubDownload:
        return HubDownload(self._client, path, start, length, max_bytes)


def _token_advice() -> str:
    token = "a token was sent" if "authorization" in hub_headers() else "no token was found"
    return f"{token}; set HF_TOKEN, or run `hf auth login`"


def hub_address() -> str:
    """Return the address of the Hub, as the environment has it now."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_headers() -> Mapping[str, str]:
    """Return the headers that a request to the Hub needs.

    Raises:
        TransportError: `huggingface_hub` is not installed.
    """
    try:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there
    except ImportError as error:
        raise TransportError(
            "hf:// needs huggingface_hub, which is not installed; install it by: pip install 'asyncloader[hf]'"
        ) from error
    return {name: value for name, value in build_hf_headers(library_name="asyncloader").items() if value}
