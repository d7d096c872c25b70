"""Which transport reads which URL, and when it is closed."""

from __future__ import annotations

import asyncio
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, RemoteIterableDataset
from asyncloader.remote.stores import Location, LoopStores, Stores, strip_signature
from asyncloader.transports import MemoryTransport, TransportClosed, UnknownScheme
from asyncloader.transports.cache_layout import object_url
from asyncloader.transports.cached import CachedTransport
from tests.helpers.running import cancelled_after


@pytest.mark.parametrize(
    ("url", "root", "path"),
    [
        ("/data/a.tar", "/", "data/a.tar"),
        ("/data//x/../a b.tar", "/", "data/a b.tar"),
        ("/data/", "/", "data/"),
        ("file:///data/a%20b.tar", "/", "data/a b.tar"),
        ("http://host/a%20b/c.tar", "http://host", "a b/c.tar"),
        ("https://user:key@host:81/c.tar?sig=%2F", "https://user:key@host:81?sig=%2F", "c.tar"),
        ("https://host/train/", "https://host", "train/"),
        ("https://host//twice/c.tar", "https://host//twice/", "c.tar"),
        ("https://host/a%2Fb/c.tar", "https://host/a%2Fb/", "c.tar"),
        ("https://host/o/a%2Fb%2fc%20d.tar?alt=media", "https://host/o/a%2Fb%2f?alt=media", "c d.tar"),
        ("https://host/o/a.tar%2F", "https://host/o/", "a.tar/"),
        ("https://host/%2Fa.tar", "https://host/%2F", "a.tar"),
        ("http://host/caf%E9.tar", "http://host", "caf\udce9.tar"),
        ("file:///data/caf%E9.tar", "/", "data/caf\udce9.tar"),
        ("s3://bucket/a/b?c#d%20.tar", "s3://bucket", "a/b?c#d%20.tar"),
        ("gs://bucket/train/", "gs://bucket", "train/"),
        ("gopher://host/a/b.tar", "gopher://host/a/", "b.tar"),
    ],
)
def test_places(url: str, root: str, path: str) -> None:
    """URLs share a root where possible: all files, and all objects of a server or bucket."""
    assert Stores().locate(url) == Location(root, path)


@pytest.mark.parametrize(
    "name", ["o/a%2Fb%20c.tar?alt=media", "caf%E9.tar", "%C3%BC%23%3F%25.tar?sig=a%2Fb%2B", "%2Fa.tar"]
)
async def test_web_urls_are_asked_for_as_they_are_written(name: str) -> None:
    """Escapes are kept: an escaped slash is no slash, and bytes need be no UTF-8."""
    stores = Stores()
    transport: Any
    transport, path = stores.find(f"https://host/{name}")
    assert transport._client.url(path) == f"https://host/{name}"
    await stores.aclose()


def test_relative_paths_belong_to_the_directory_of_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths keep their directory also in a worker that runs in another directory."""
    monkeypatch.chdir(tmp_path)
    stores = Stores()
    monkeypatch.chdir("/")
    copy: Stores = pickle.loads(pickle.dumps(stores))
    for each in (stores, copy):
        assert each.locate("a.tar").path == os.fspath(tmp_path)[1:] + "/a.tar"


def test_a_removed_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is needed by relative paths only, and by workers that would begin there; both errors say so."""
    (tmp_path / "removed").mkdir()
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    for url in (str(tmp_path / "a.jsonl"), (tmp_path / "a.jsonl").as_uri()):
        assert len(list(DataLoader[Any](RemoteIterableDataset(url)))) == 2
    with pytest.raises(ValueError, match="absolute path"):
        list(DataLoader[Any](RemoteIterableDataset("a.jsonl")))
    with pytest.raises(FileNotFoundError, match=r"os\.chdir"):
        list(DataLoader[Any](RemoteIterableDataset(url), num_workers=1))


@pytest.mark.parametrize("url", ["file://elsewhere/a.tar", "file:///a.tar?b"])
def test_file_urls_name_local_files(url: str) -> None:
    """Other file URLs are refused, as by the local transport."""
    with pytest.raises(ValueError, match="file"):
        Stores().find(url)


async def test_transports_are_shared_and_opened_anew_after_closing() -> None:
    """URLs of one root share a transport; `aclose` closes it, and the stores can be used again."""
    stores = Stores()
    first, _ = stores.find("http://host/a.tar")
    assert stores.find("http://host/b/c.tar")[0] is first
    assert stores.find("http://other/a.tar")[0] is not first
    await stores.aclose()
    with pytest.raises(TransportClosed):
        await first.size("a.tar")
    assert stores.find("http://host/a.tar")[0] is not first
    await stores.aclose()


class SlowToClose(MemoryTransport):
    """Its close takes a turn of the loop."""

    async def aclose(self) -> None:
        try:
            await asyncio.sleep(0)
        finally:
            await super().aclose()


async def test_a_cancelled_close_closes_every_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that is cancelled while one transport closes must not leave the others open: nobody else has them."""
    monkeypatch.setattr("asyncloader.remote.stores.open_transport", lambda _: SlowToClose({"x": b"1"}))
    for turns in (1, 2, 3):
        stores = LoopStores(Stores())
        stores.enter()
        opened = [stores.here().stores.find(f"memory://{host}/x")[0] for host in "abc"]
        await cancelled_after(turns, stores.leave())
        for transport in opened:
            with pytest.raises(TransportClosed):
                await transport.read("x")


def test_options_reach_the_transports() -> None:
    """The options are the keyword arguments of every transport that is opened."""
    transport, _ = Stores({"requests": 3}).find("http://host/a.tar")
    assert "requests=3" in repr(transport)
    with pytest.raises(UnknownScheme):
        Stores().find("gopher://host/a.tar")


def test_a_listing_is_relative_to_its_folder() -> None:
    """With `listing` each folder of a server has a transport of its own."""
    stores = Stores({"listing": "files.txt"})
    assert stores.locate("http://host/a/b/") == Location("http://host/a/b/", "")
    assert stores.locate("http://host/a/b/c.tar") == Location("http://host/a/b/", "c.tar")


async def test_a_transport_of_the_users_own_stays_open() -> None:
    """The user closes the transport they made; the copy that a worker gets is closed with its stores."""
    transport = MemoryTransport({"a/b.tar": b"1"})
    stores = Stores(transport=transport)
    assert stores.find("a/b.tar") == (transport, "a/b.tar")
    assert stores.find("/") == (transport, "")
    await stores.aclose()
    assert await transport.read("a/b.tar") == b"1"
    copy: Stores = pickle.loads(pickle.dumps(stores))
    own, path = copy.find("a/b.tar")
    assert await own.read(path) == b"1"
    await copy.aclose()
    with pytest.raises(TransportClosed):
        await own.read(path)
    await transport.aclose()


async def test_remote_objects_are_cached_and_local_ones_are_not(tmp_path: Path) -> None:
    """Only remote objects are cached; a signature is no part of a cached object's name."""
    stores = Stores(cache_dir=tmp_path, cache_bytes=1000)
    transport, path = stores.find("http://host/a.tar?sig=1")
    assert isinstance(transport, CachedTransport)
    assert (transport.url, path) == ("http://host", "a.tar")
    assert not isinstance(stores.find("/data/a.tar")[0], CachedTransport)
    await stores.aclose()


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("id=7&part=2", "?id=7&part=2"),
        ("X-Amz-Signature=a&id=7&X-Amz-Expires=3600&versionId=b%2Fc", "?id=7&versionId=b%2Fc"),
        ("Expires=1&Signature=a%3D&Key-Pair-Id=b", ""),
        ("X-Goog-Algorithm=a&X-Goog-Signature=b&generation=5", "?generation=5"),
        ("sv=2024&st=a&se=b&sr=c&sp=r&skoid=d&sig=e&snapshot=f", "?snapshot=f"),
        ("se=1&sp=2&sr=3", "?se=1&sp=2&sr=3"),
        ("", ""),
    ],
    ids=["none", "aws", "cloudfront", "google", "azure", "not azure", "empty"],
)
def test_what_signs_a_url_does_not_name_its_object(query: str, kept: str) -> None:
    """The rest of the query does name it: without that two objects would be cached as one."""
    assert strip_signature(f"https://host/folder?{query}") == f"https://host/folder{kept}"


async def test_buckets_of_different_stores_are_cached_apart(tmp_path: Path) -> None:
    """Two stores may have a bucket of the same name; their endpoints differ."""
    urls = set()
    for options in ({}, {"endpoint": "https://minio.example:9000"}, {"endpoint": "https://other.example"}):
        stores = Stores(options, cache_dir=tmp_path)
        transport, _ = stores.find("s3://bucket/a.tar")
        assert isinstance(transport, CachedTransport)
        urls.add(object_url(transport.url, "a.tar"))
        await stores.aclose()
    assert len(urls) == 3
    assert "s3://bucket/a.tar" in urls


def test_incompatible_options() -> None:
    """A transport has no URL to cache by, and takes no options after it was made."""
    with pytest.raises(ValueError, match="CachedTransport"):
        Stores(transport=MemoryTransport(), cache_dir="x")
    with pytest.raises(ValueError, match="options requests"):
        Stores({"requests": 1}, transport=MemoryTransport())
