"""Finds the transport for a shard's URL, and shares transports between shards.

Data path: URL -> [stores] -> transport and path -> reading.

Shards share transports, and so connections and threads, as far as their URLs allow:

    /data/a.tar, file:///data/a.tar        one transport for all local files
    https://host/a.tar                     one per scheme and host (with port and user)
    https://host/a.tar?sig=...             one per scheme, host and query: the query belongs to the transport
    https://host/o/x%2Fa.tar               one per text before the last ``%2F``, which is not equivalent to ``/``
    s3://bucket/a.tar, gs://, az://        one per bucket
    hf://datasets/owner/name@rev/a.tar     one per dataset and revision
    other://x/y/a.tar                      one per folder, the text before the last ``/``

A transport belongs to one event loop. `LoopStores` has separate stores for each loop, because without workers several
iterators may read the dataset at the same time, in one loop or in several, and must not close each other's transports.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from asyncloader.base.sizes import Size, optional_size
from asyncloader.errors import NoEffectWarning
from asyncloader.remote.catalog import BUCKETS, Shard
from asyncloader.transports import Transport, open_transport
from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import InvalidPath
from asyncloader.transports.hub_names import HubDataset

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_WEB = frozenset({"http", "https"})

_NOT_CACHED = frozenset({"file", "memory"})

# Query parameters of URLs signed by AWS, CloudFront, Google, Azure, Alibaba and others, in lower case.
_SIGNING = re.compile(
    r"x-amz-.*|x-goog-.*|x-oss-(signature.*|credential|date|expires|security-token)"
    r"|awsaccesskeyid|googleaccessid|ossaccesskeyid|key-pair-id|signature|policy|expires|sig|access_token"
)
# Azure's names are short; they count as a signature only if all three of these occur.
_SAS = frozenset({"sv", "se", "sig"})
_SAS_SIGNING = re.compile(r"s[veprsti]|srt|spr|sip|sdd|sk(oid|tid|[tesv])|s[au]oid|scid")


class Location(NamedTuple):
    """The location of an object: the URL of a transport's root, and the path below it."""

    root: str
    path: str


def scheme_of(url: str) -> str:
    """Return the scheme of `url` in lower case; ``"file"`` for a plain path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


def is_cached(url: str) -> bool:
    """Return whether `Stores` with a `cache_dir` cache an object: local objects are not cached."""
    return scheme_of(url) not in _NOT_CACHED


def warn_without_effect(urls: Any, cache_dir: Any, cache_bytes: Size | None, cache_revalidate: bool) -> None:
    """Warn of cache arguments without an effect, at the line that makes the dataset."""
    if cache_dir is None:
        given = {"cache_bytes": cache_bytes is not None, "cache_revalidate": not cache_revalidate}
        for name in (name for name, set_ in given.items() if set_):
            warnings.warn(f"{name}= does nothing without cache_dir=", NoEffectWarning, stacklevel=3)
    elif not any(is_cached(os.fspath(url)) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)):
        warnings.warn("cache_dir= does nothing for local files, which are not cached", NoEffectWarning, stacklevel=3)


class Stores:
    """The transports of a set of shards, each opened on first use. Pickles as its configuration.

    Args:
        options: keyword arguments for the transports that are opened (`open_transport`). With ``listing``, each folder
            of a web server has a transport of its own, to which the listing's path is relative.
        transport: reads all objects; URLs are then paths below its root (``/`` is the root itself), passed to it
            unchanged. Its creator closes it; `aclose` of an unpickled copy of these stores closes its copy.
        cache_dir: directory in which remote objects are cached. None: no caching.
        cache_bytes: maximum size of the cache, as `CachedTransport` takes it. None: no limit.
        cache_revalidate: ask the store on each read whether the cached object is current.

    Attributes:
        options, transport, cache_dir: as given; the directory by its absolute path.

    Raises:
        ValueError: `cache_dir` together with `transport`: wrap it in a `CachedTransport` yourself, because only you
            know the URL that identifies its objects. Or `transport` together with `options`.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        transport: Transport | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: Size | None = None,
        cache_revalidate: bool = True,
    ) -> None:
        if transport is not None and cache_dir is not None:
            raise ValueError(
                "cache_dir= needs to know the URLs of what is cached, and transport= has none: give a "
                "CachedTransport(transport, url, cache_dir) as transport="
            )
        if transport is not None and options:
            raise ValueError(
                f"options {', '.join(sorted(options))} are for transports that are opened from URLs, and transport= is "
                "open already: give them to its constructor"
            )
        self.options = dict(options or {})
        self.transport = transport
        self.cache_dir = None if cache_dir is None else os.path.abspath(os.fspath(cache_dir))  # noqa: PTH100 - no I/O
        self._cache_bytes = optional_size("cache_bytes", cache_bytes)
        self._cache_revalidate = cache_revalidate
        # Kept, because a worker may have another working directory. Only relative paths need it: it may be removed.
        self._folder = ""
        with suppress(FileNotFoundError):
            self._folder = os.getcwd()  # noqa: PTH109 - a string, as the paths
        self._open: dict[str, Transport] = {}
        self._owned = False

    def __repr__(self) -> str:
        if self.transport is not None:
            return f"<Stores of {self.transport!r}>"
        return f"<Stores open={len(self._open)} cache_dir={self.cache_dir!r}>"

    def __getstate__(self) -> dict[str, Any]:
        # An unpickled copy is the only user of its transport, and closes it.
        return {**vars(self), "_open": {}, "_owned": True}

    def fresh(self) -> Stores:
        """Return a copy with no open transports; it shares the user's own transport, and does not close it."""
        same = Stores.__new__(Stores)
        vars(same).update(vars(self), _open={})
        return same

    def for_another_loop(self) -> Stores:
        """Return stores for another loop than the one that reads: a transport belongs to one loop at a time."""
        if self.transport is None:
            return self.fresh()  # not pickled: options may hold functions
        try:
            copy: Stores = pickle.loads(pickle.dumps(self))
        except (pickle.PicklingError, AttributeError, TypeError):
            return self.fresh()  # not picklable: the dataset has no workers, and this loop is the reading loop
        return copy

    def name(self, url: str) -> str:
        """Return a text that names an object in this and in later processes: without a signature, and absolute."""
        if scheme_of(url) == "file" and self.transport is None:
            return "/" + self.locate(url).path
        url = strip_signature(url)
        return f"{url}?{endpoint}" if (endpoint := self.options.get("endpoint")) else url

    def find(self, url: str) -> tuple[Transport, str]:
        """Return the transport that reads `url`, and the path of `url` below its root. No I/O.

        A URL that ends with ``/`` gives the path of a prefix, which ends with ``/`` or is empty.

        Raises:
            UnknownScheme, TransportError, ValueError: the errors of `open_transport`.
        """
        if self.transport is not None:
            return self.transport, url.removeprefix("/")
        location = self.locate(url)
        transport = self._open.get(location.root)
        if transport is None:
            transport = self._open[location.root] = self._open_root(location.root)
        return transport, location.path

    def locate(self, url: str) -> Location:
        """Split `url` into the root of its transport and the path below it.

        Raises:
            ValueError: a ``file://`` URL that names no local file.
        """
        scheme = scheme_of(url)
        if scheme == "file":
            return Location("/", self._local_path(url))
        if scheme in _WEB:
            return self._web_location(url)
        if scheme in BUCKETS:
            # Keys are used literally: they may contain "?", "#" and "%".
            bucket, _, key = url.partition("://")[2].partition("/")
            return Location(f"{scheme}://{bucket}", key)
        if scheme == "hf":
            dataset, path = HubDataset.split(url)
            return Location(dataset.url, path)
        path = url.partition("?")[0].partition("#")[0]
        split = path.rfind("/") + 1
        return Location(url[:split], url[split:])

    async def aclose(self) -> None:
        """Close the transports that `find` has opened. A later `find` opens new transports."""
        failures: list[Exception] = []
        # Closes all, even if the caller is cancelled while one of them closes: `leave` does not come back for the rest.
        async with AsyncExitStack() as stack:
            if self._owned and self.transport is not None:
                stack.push_async_callback(_close, self.transport, failures)
            for root, transport in reversed(self._open.items()):
                stack.push_async_callback(self._close_opened, root, transport, failures)
        if failures:
            raise failures[0]

    async def _close_opened(self, root: str, transport: Transport, failures: list[Exception]) -> None:
        await _close(transport, failures)
        # Removed after its close: if that is cancelled, a later `aclose` can close it.
        self._open.pop(root, None)

    def _open_root(self, root: str) -> Transport:
        transport = open_transport(root, **self.options)
        if self.cache_dir is None or not is_cached(root):
            return transport
        from asyncloader.transports.cached import CachedTransport

        url = strip_signature(root)
        if endpoint := self.options.get("endpoint"):  # buckets of two endpoints may have the same name
            url = f"{url}?{endpoint}"
        return CachedTransport(transport, url, self.cache_dir, self._cache_bytes, revalidate=self._cache_revalidate)

    def _local_path(self, url: str) -> str:
        path = url
        if "://" in url and _SCHEME.match(url):
            parts = urlsplit(url)
            if parts.netloc not in {"", "localhost"} or not parts.path:
                raise ValueError(f"{url!r} is not a local file URL; write file:///absolute/file, or a plain path")
            if parts.query or parts.fragment:
                raise ValueError(f"{url!r} holds a bare '?' or '#'; escape it as %3F or %23, or give a plain path")
            path = _unquote(parts.path)
        if not (self._folder or path.startswith("/")):
            raise ValueError(f"{url!r} is relative to the working directory, which was removed: give an absolute path")
        whole = os.path.normpath(os.path.join(self._folder, path)).strip("/")  # noqa: PTH118 - strings in, strings out
        return whole + "/" if path.endswith("/") and whole else whole

    def _web_location(self, url: str) -> Location:
        parts = urlsplit(url)
        folder, _, name = parts.path.rpartition("/")
        folder += "/"
        path = _unquote(parts.path[1:])
        try:
            check_path(path.removesuffix("/"))
            plain = "listing" not in self.options and "%2f" not in parts.path.lower()
        except InvalidPath:
            plain = False  # it has empty parts or dots, which the server interprets
        if plain:
            return Location(urlunsplit((parts.scheme, parts.netloc, "", parts.query, "")), path)
        # A name that contains an escaped "/": the text before the last escaped "/" belongs to the root, unchanged.
        cut = name.lower().rfind("%2f") + 3
        if 2 < cut < len(name):
            folder, name = folder + name[:cut], name[cut:]
        return Location(urlunsplit((parts.scheme, parts.netloc, folder, parts.query, "")), _unquote(name))


def _unquote(text: str) -> str:
    """Decode percent-escapes; bytes that are not UTF-8 become surrogates, as in the system's file names."""
    return unquote(text, errors="surrogateescape")


def strip_signature(url: str) -> str:
    """Return a URL without the signature of web servers: what was cached with another signature must be found.

    All other parameters of a query are kept: they may select the object (``?id=7``).
    """
    if scheme_of(url) not in _WEB:
        return url
    base, _, query = url.partition("?")
    each = [(part.partition("=")[0].lower(), part) for part in query.split("&")]
    sas = {name for name, _ in each} >= _SAS
    kept = [part for name, part in each if not (_SIGNING.fullmatch(name) or (sas and _SAS_SIGNING.fullmatch(name)))]
    rest = "&".join(kept)
    return f"{base}?{rest}" if rest else base


def names_of(shards: Sequence[Shard]) -> list[str]:
    """Return the URLs that identify the shards in a state, without signatures."""
    return [strip_signature(each.url) for each in shards]


async def _close(transport: Transport, failures: list[Exception]) -> None:
    """Close a transport, and collect its error, so that the others are closed, too."""
    try:
        await transport.aclose()
    except Exception as error:
        failures.append(error)


class LoopStores:
    """Has separate stores for each event loop, and closes them when their last user in that loop has left. Pickles.

    Args:
        stores: the template. A user's own transport is shared by all copies.
    """

    def __init__(self, stores: Stores) -> None:
        self.template = stores
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopUse] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), (self.template,)

    def here(self) -> LoopUse:
        """Return the stores of the running loop, of which the caller is a user."""
        loop = asyncio.get_running_loop()
        use = self._open.get(loop)
        if use is None:
            use = self._open[loop] = LoopUse(self.template.fresh())
        return use

    def enter(self) -> LoopUse:
        """Start to use the stores of the running loop."""
        use = self.here()
        use.users += 1
        return use

    async def leave(self) -> None:
        """Stop using the stores of the running loop. Raises the errors of `Stores.aclose`."""
        use = self.here()
        use.users -= 1
        if use.users <= 0:
            # Before the close, which waits: a user that enters during it must get new stores.
            del self._open[asyncio.get_running_loop()]
            try:
                if use.reader is not None:
                    await use.reader.aclose()
            finally:
                await use.stores.aclose()


class LoopUse:
    """The stores of one loop, and the number of their users.

    Attributes:
        reader: what a user has made that reads from the stores, and is closed before them; None at first.
    """

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.users = 0
        self.reader: Any = None
