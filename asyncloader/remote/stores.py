"""From a shard's URL to the transport that reads it. Data path: URL -> [stores] -> transport and path -> bytes.

Shards share transports, and so connections and threads, as far as their URLs allow:

    /data/a.tar, file:///data/a.tar        one transport for all local files
    https://host/a.tar                     one a scheme and host (and port, user, password)
    https://host/a.tar?sig=...             one a scheme, host and query: the query belongs to the transport
    https://host/o/x%2Fa.tar               one for what stands before the last ``%2F``, which is not the same as ``/``
    s3://bucket/a.tar, gs://, az://        one a bucket
    other://x/y/a.tar                      one a folder, what stands before the last ``/``

Stores for each event loop that reads. Data path: dataset -> [loop_stores] -> stores -> transport.

A transport belongs to one loop. A dataset without workers may be read by several iterators at a time, in one loop or
in several; what one of them ends must not be taken from the others.
"""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from asyncloader.transports import Transport, open_transport
from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import InvalidPath

__all__ = [
    "Location",
    "LoopStores",
    "Stores",
    "scheme_of",
    "unsigned",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_WEB = frozenset({"http", "https"})
_BUCKETS = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})

_NOT_CACHED = frozenset({"file", "memory"})

# What signed URLs of AWS, CloudFront, Google, Azure, Alibaba and their like have in their queries, in lower case.
_SIGNING = re.compile(
    r"x-amz-.*|x-goog-.*|x-oss-(signature.*|credential|date|expires|security-token)"
    r"|awsaccesskeyid|googleaccessid|ossaccesskeyid|key-pair-id|signature|policy|expires|sig|access_token"
)
# Azure's names are short, and its own only where all three of these are.
_SAS = frozenset({"sv", "se", "sig"})
_SAS_SIGNING = re.compile(r"s[veprsti]|srt|spr|sip|sdd|sk(oid|tid|[tesv])|s[au]oid|scid")


class Location(NamedTuple):
    """Where an object is: the URL of a transport's root, and the path below it."""

    root: str
    path: str


def scheme_of(url: str) -> str:
    """The scheme of `url` in lower case; ``"file"`` for a plain path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


class Stores:
    """The transports of a set of shards, each opened when it is first asked for. Pickles as its configuration.

    Args:
        options: keyword arguments for the transports that are opened here (`open_transport`). With ``listing``, each
            folder of a web server has a transport of its own, to which the listing's path is relative.
        transport: reads everything; URLs are then paths below its root (``/`` is the root itself), and are given to it
            as they are. Whoever made
            it closes it; the copy in a worker is closed with these stores.
        cache_dir: directory in which remote objects are kept. None: nothing is kept.
        cache_bytes: of all the objects that are kept there, at most. None: no limit.
        cache_revalidate: ask the store each time whether an object is still the one that is kept.

    Raises:
        ValueError: `cache_dir` together with `transport`: wrap it in a `CachedTransport` yourself, because only you
            know the URL that its objects are to be known by. Or `transport` together with `options`.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        transport: Transport | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
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
        self._options = dict(options or {})
        self._transport = transport
        self._cache_dir = None if cache_dir is None else os.path.abspath(os.fspath(cache_dir))  # noqa: PTH100 - no I/O
        self._cache_bytes = cache_bytes
        self._cache_revalidate = cache_revalidate
        self._folder = os.getcwd()  # noqa: PTH109 - what relative paths are relative to, also in a worker
        self._open: dict[str, Transport] = {}
        self._owned = False

    def __repr__(self) -> str:
        if self._transport is not None:
            return f"<Stores of {self._transport!r}>"
        return f"<Stores open={len(self._open)} cache_dir={self._cache_dir!r}>"

    def __getstate__(self) -> dict[str, Any]:
        # A copy that was pickled has a transport that nobody else knows, and so closes it.
        return {**vars(self), "_open": {}, "_owned": True}

    def fresh(self) -> Stores:
        """The same, with nothing open; a transport of the user's own is shared, and closed by whoever closed it."""
        same = Stores.__new__(Stores)
        vars(same).update(vars(self), _open={})
        return same

    @property
    def transport(self) -> Transport | None:
        """The user's own transport, if there is one."""
        return self._transport

    def find(self, url: str) -> tuple[Transport, str]:
        """Give the transport that reads `url`, and the path of `url` below its root. No I/O.

        A URL that ends with ``/`` gives the path of a prefix, which ends with ``/`` or is empty.

        Raises:
            UnknownScheme, TransportError, ValueError: as `open_transport`.
        """
        if self._transport is not None:
            return self._transport, url.removeprefix("/")
        location = self.locate(url)
        transport = self._open.get(location.root)
        if transport is None:
            transport = self._open[location.root] = self._wrapped(location.root)
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
        if scheme in _BUCKETS:
            # Keys are taken literally: they may hold "?", "#" and "%".
            bucket, _, key = url.partition("://")[2].partition("/")
            return Location(f"{scheme}://{bucket}", key)
        path = url.partition("?")[0].partition("#")[0]
        split = path.rfind("/") + 1
        return Location(url[:split], url[split:])

    async def aclose(self) -> None:
        """Close the transports that were opened here. A later `find` opens new ones."""
        failures: list[Exception] = []
        for root, transport in list(self._open.items()):
            await _close(transport, failures)  # one that a cancelled call has not closed stays, to be closed later
            self._open.pop(root, None)
        if self._owned and self._transport is not None:
            await _close(self._transport, failures)
        if failures:
            raise failures[0]

    def _wrapped(self, root: str) -> Transport:
        transport = open_transport(root, **self._options)
        if self._cache_dir is None or scheme_of(root) in _NOT_CACHED:
            return transport
        from asyncloader.transports.cached import CachedTransport

        url = unsigned(root) if scheme_of(root) in _WEB else root
        if endpoint := self._options.get("endpoint"):  # elsewhere there may be a bucket of the same name
            url = f"{url}?{endpoint}"
        return CachedTransport(transport, url, self._cache_dir, self._cache_bytes, revalidate=self._cache_revalidate)

    def _local_path(self, url: str) -> str:
        path = url
        if "://" in url and _SCHEME.match(url):
            parts = urlsplit(url)
            if parts.netloc not in {"", "localhost"} or not parts.path:
                raise ValueError(f"{url!r} is not a local file URL; write file:///absolute/file, or a plain path")
            if parts.query or parts.fragment:
                raise ValueError(f"{url!r} holds a bare '?' or '#'; escape it as %3F or %23, or give a plain path")
            path = _unquoted(parts.path)
        whole = os.path.normpath(os.path.join(self._folder, path)).strip("/")  # noqa: PTH118 - strings in, strings out
        return whole + "/" if path.endswith("/") and whole else whole

    def _web_location(self, url: str) -> Location:
        parts = urlsplit(url)
        folder, _, name = parts.path.rpartition("/")
        folder += "/"
        path = _unquoted(parts.path[1:])
        try:
            check_path(path.removesuffix("/"))
            plain = "listing" not in self._options and "%2f" not in parts.path.lower()
        except InvalidPath:
            plain = False  # empty parts and dots: they are the server's business
        if plain:
            return Location(urlunsplit((parts.scheme, parts.netloc, "", parts.query, "")), path)
        # A name that holds "/" itself: what is before the last one is the root's, and stays as it is written.
        cut = name.lower().rfind("%2f") + 3
        if 2 < cut < len(name):
            folder, name = folder + name[:cut], name[cut:]
        return Location(urlunsplit((parts.scheme, parts.netloc, folder, parts.query, "")), _unquoted(name))


def _unquoted(text: str) -> str:
    """Bytes that are no UTF-8 become what the system's names have for them, so that they can be told again."""
    return unquote(text, errors="surrogateescape")


def unsigned(url: str) -> str:
    """Give a web URL without what signs it: that says who reads, and would hide what was cached under another one.

    All else in a query says what is read (``?id=7``), as far as anybody can know.
    """
    base, _, query = url.partition("?")
    each = [(part.partition("=")[0].lower(), part) for part in query.split("&")]
    sas = {name for name, _ in each} >= _SAS
    kept = [part for name, part in each if not (_SIGNING.fullmatch(name) or (sas and _SAS_SIGNING.fullmatch(name)))]
    rest = "&".join(kept)
    return f"{base}?{rest}" if rest else base


async def _close(transport: Transport, failures: list[Exception]) -> None:
    """Close it, and keep the error: the others are closed in any case."""
    try:
        await transport.aclose()
    except Exception as error:
        failures.append(error)


class LoopStores:
    """Gives each loop stores of its own, and closes them when the last who uses them there has left. Pickles.

    Args:
        stores: what they are all like. A transport of the user's own is the same in all of them.
    """

    def __init__(self, stores: Stores) -> None:
        self.template = stores
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), (self.template,)

    def here(self) -> Stores:
        """Those of the running loop; somebody has entered."""
        return self._shared().stores

    def enter(self) -> None:
        """They are used in the running loop from now on."""
        self._shared().users += 1

    async def leave(self) -> None:
        """They are not any more, by one who entered. Errors as `Stores.aclose`."""
        loop = asyncio.get_running_loop()
        shared = self._shared()
        shared.users -= 1
        if shared.users <= 0:
            del self._open[loop]  # at once: who enters meanwhile gets others
            await shared.stores.aclose()

    def _shared(self) -> _Shared:
        loop = asyncio.get_running_loop()
        shared = self._open.get(loop)
        if shared is None:
            shared = self._open[loop] = _Shared(self.template)
        return shared


class _Shared:
    def __init__(self, template: Stores) -> None:
        self.stores = template.fresh()
        self.users = 0
