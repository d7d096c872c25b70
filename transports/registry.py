"""Finds the transport for a URL, by its scheme.

Data path: URL -> [registry] -> transport.

A package adds a transport by an entry point, whose name is the scheme and whose value is a `Transport` subclass:

    [project.entry-points."asyncloader.transports"]
    gopher = "gopher_for_asyncloader:GopherTransport"

Entry points cannot replace built-in schemes. Transports cannot be registered at run time, so the meaning of a URL
depends on the installed packages and not on earlier imports.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from asyncloader.transports.base import Transport
from asyncloader.transports.errors import TransportError, UnknownScheme

ENTRY_POINT_GROUP = "asyncloader.transports"

_OBJECT_STORE = ("asyncloader.transports.object_store", "ObjectStoreTransport")

# By name, so that a scheme's dependencies are imported on first use.
_BUILT_IN = {
    **dict.fromkeys(("abfs", "abfss", "adl", "az", "azure", "gs", "s3", "s3a"), _OBJECT_STORE),
    "file": ("asyncloader.transports.local", "LocalTransport"),
    "hf": ("asyncloader.transports.hugging_face", "HuggingFaceTransport"),
    "http": ("asyncloader.transports.http", "HttpTransport"),
    "https": ("asyncloader.transports.http", "HttpTransport"),
    "memory": ("asyncloader.transports.memory", "MemoryTransport"),
}

# RFC 3986 section 3.1. Without "://" it is a plain path: file names may hold colons.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_transport(url: str | os.PathLike[str], **options: Any) -> Transport:
    """Make the transport for `url`. Does no I/O in the store; the first read does.

    Args:
        url: ``scheme://...``, or the plain path of a local directory, which means ``file://``.
        options: keyword arguments of the transport's constructor.

    Raises:
        UnknownScheme: no installed package provides the scheme; the message lists the known ones.
        TransportError: the package that provides the scheme cannot be loaded.
        ValueError: the URL is malformed.
    """
    address = os.fspath(url)
    match = _SCHEME.match(address)
    scheme = match.group(1).lower() if match else "file"
    return find_transport(scheme).from_url(address, **options)


def known_schemes() -> dict[str, str]:
    """Return the schemes that `open_transport` knows, ascending, each with the package that provides it."""
    found = {entry.name: _provider(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return dict(sorted({**found, **dict.fromkeys(_BUILT_IN, "asyncloader")}.items()))


def find_transport(scheme: str) -> type[Transport]:
    """Return the class that provides `scheme` (lower case). Errors as in `open_transport`."""
    if scheme in _BUILT_IN:
        module, name = _BUILT_IN[scheme]
        built_in: type[Transport] = getattr(import_module(module), name)
        return built_in
    entries = {entry.value: entry for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme)}
    if not entries:
        known = ", ".join(
            name if package == "asyncloader" else f"{name} ({package})" for name, package in known_schemes().items()
        )
        raise UnknownScheme(
            f"no transport serves the scheme {scheme!r}; known are: {known}. A package can add it by an entry point in "
            f"the group {ENTRY_POINT_GROUP!r}"
        )
    if len(entries) > 1:
        packages = ", ".join(sorted(f"{_provider(entry)} ({entry.value})" for entry in entries.values()))
        raise TransportError(f"more than one package serves the scheme {scheme!r}: {packages}; uninstall all but one")
    (entry,) = entries.values()
    return _load(entry)


def _load(entry: EntryPoint) -> type[Transport]:
    where = f"the scheme {entry.name!r} is served by {entry.value!r} of package {_provider(entry)!r}"
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise TransportError(f"{where}, which cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise TransportError(f"{where}, which is not a subclass of asyncloader.transports.Transport: {found!r}")
    return found


def _provider(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"
