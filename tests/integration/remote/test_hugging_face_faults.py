"""A Hub, or what claims to be one, that refuses, breaks off, changes and lies: what is read is right, or an error that
says what to do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader import RemoteMapDataset
from asyncloader.transports import (
    AccessDenied,
    HuggingFaceTransport,
    ObjectNotFound,
    ReadFailed,
    Transport,
    open_transport,
)
from tests.helpers.http_store import HttpStore, broken, serving, status
from tests.helpers.hub import QUICK, ROOT, TOKEN, Hub

pytestmark = pytest.mark.network

LARGE = bytes(range(256)) * 8


@pytest_asyncio.fixture
async def elsewhere() -> AsyncIterator[HttpStore]:
    """A server that is neither the Hub nor its CDN."""
    async with serving() as store:
        yield store


async def listed(transport: Transport, prefix: str = "") -> list[str]:
    async with aclosing(transport.list(prefix)) as paths:
        return [path async for path in paths]


NAMES = [
    "a b.jsonl",
    "50%.jsonl",
    "%41.jsonl",
    "é/ü 漢.jsonl",
    "q?x=1&y#z.jsonl",
    "+;=@:,.jsonl",
    "[1]{2}*.jsonl",
    "'\"\\.jsonl",
]


@pytest.mark.parametrize("kind", ["small", "redirected"])
async def test_names(hub: Hub, kind: str) -> None:
    """Any name is listed and read as it is, from the Hub and from the CDN."""
    hub.large = 1 if kind == "redirected" else 1000
    for number, name in enumerate(NAMES):
        hub.put(f"data/{name}", json.dumps({"n": number}).encode())
    async with open_transport(ROOT, retry=QUICK) as transport:
        assert await listed(transport, "data/") == sorted(f"data/{name}" for name in NAMES)
        for number, name in enumerate(NAMES):
            assert json.loads(await transport.read(f"data/{name}"))["n"] == number
    data = RemoteMapDataset(f"{ROOT}/data/")
    await data.prepare()
    found = [sample["n"] for sample in await data.__getitems__(range(len(NAMES)))]
    assert sorted(found) == [*range(len(NAMES))]


@pytest.mark.parametrize("where", ["cdn", "elsewhere", "hub"])
async def test_redirects(hub: Hub, elsewhere: HttpStore, where: str) -> None:
    """The token follows a redirect to the Hub, and to no other server; also for a listing and a commit."""
    hub.put("data/a", LARGE)
    server: Any = {"cdn": hub.cdn, "elsewhere": elsewhere, "hub": hub}[where]
    targets = ["/api/datasets/acme/digits/revision/main", f"/api/datasets/acme/digits/tree/{hub.main}"]
    answers = [{"sha": hub.main}, [{"type": "file", "path": "data/a", "size": len(LARGE)}]]
    for number, (target, answer) in enumerate(zip(targets, answers, strict=True)):
        hub.faults[target].append(web.Response(status=307, headers={"Location": f"{server.url}/moved/{number}"}))
        if where == "hub":
            hub.faults[f"/moved/{number}"].append(web.json_response(answer))
        else:
            server.put(f"moved/{number}", json.dumps(answer).encode())
    async with open_transport(ROOT, retry=QUICK) as transport:
        assert await listed(transport) == ["data/a"]
        assert await transport.read("data/a") == LARGE
    asked = [each for each in server.asked if each.path.removeprefix("/").startswith("moved/")]
    assert len(asked) == 2
    assert all(("Authorization" in each.headers) == (where == "hub") for each in asked)
    assert not [each for each in hub.cdn.asked + elsewhere.asked if TOKEN in str(each.headers)]


async def test_a_cdn_that_ends(hub: Hub, elsewhere: HttpStore) -> None:
    """A redirect that was followed before is asked for anew when its server does not answer any more."""
    hub.put("data/a", LARGE)
    async with serving() as dying:
        alive, hub.cdn = hub.cdn, dying
        async with open_transport(ROOT, retry=QUICK) as transport:
            assert await transport.read_range("data/a", 0, 2) == LARGE[:2]
            hub.cdn = alive
            dying.faults[f"{hub.main}/data/a"].extend([broken(-1)] * 100)
            assert await transport.read_range("data/a", 1, 2) == LARGE[1:3]
            assert await transport.read_range("data/a", 2, 2) == LARGE[2:4]
            assert isinstance(transport, HuggingFaceTransport)
            assert transport.retries.total == 1
            assert len(hub.paths("resolve")) == 2


async def test_a_cdn_that_is_busy(hub: Hub) -> None:
    """It is asked again after the time that it names; the Hub, which counts requests, is not asked."""
    hub.put("data/a", LARGE)
    async with open_transport(ROOT, retry=QUICK) as transport:
        assert await transport.read_range("data/a", 0, 2) == LARGE[:2]
        hub.cdn.faults[f"{hub.main}/data/a"].extend([status(429, Retry_After="0")] * 2)
        assert await transport.read_range("data/a", 1, 2) == LARGE[1:3]
        assert isinstance(transport, HuggingFaceTransport)
        assert transport.retries.kinds == {"status 429": 2}
        assert len(hub.paths("resolve")) == 1


@pytest.mark.parametrize("pinned", [False, True], ids=["a branch", "a commit"])
@pytest.mark.parametrize("code", [401, 403])
async def test_files_that_are_refused(hub: Hub, code: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated dataset tells everyone its commit, and refuses its files: the error has the Hub's reason, says whether a
    token was sent, and what to do.
    """
    commit = hub.put("data/a", b"x")
    reason = "Access to dataset acme/digits is restricted: visit https://hub/acme/digits to ask for access."
    path = f"/datasets/acme/digits/resolve/{commit}/data/a"
    for token in (True, False):
        if not token:
            monkeypatch.delenv("HF_TOKEN")
            monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
        headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": reason}
        hub.faults[path].append(web.Response(status=code, headers=headers))
        async with open_transport(f"{ROOT}@{commit}" if pinned else ROOT, retry=QUICK) as transport:
            with pytest.raises(AccessDenied) as denied:
                await transport.read("data/a")
        assert reason in str(denied.value)
        assert "set HF_TOKEN, or run `hf auth login`" in str(denied.value)
        assert ("a token was sent" if token else "no token was found") in str(denied.value)
        assert TOKEN not in str(denied.value)


async def test_a_commit_that_is_gone(hub: Hub) -> None:
    """A folder that a commit does not have is empty. A commit that the Hub does not have any more is an error."""
    commit = hub.put("data/a", b"x")
    target = f"/api/datasets/acme/digits/tree/{commit}/data"
    hub.faults[target].append(
        web.json_response({"error": "Invalid rev id"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
    )
    async with open_transport(f"{ROOT}@{commit}", retry=QUICK) as transport:
        with pytest.raises(FileNotFoundError, match="RevisionNotFound"):
            await listed(transport, "data/")
        hub.faults[target].append(web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"}))
        assert await listed(transport, "data/") == []


@pytest.mark.parametrize("etag", ['W/"a"', '"a"', "", "junk"])
async def test_etags_of_two_servers(hub: Hub, elsewhere: HttpStore, etag: str) -> None:
    """A commit's file is the same on each of the CDN's servers, whatever they call it."""
    hub.put("data/a", LARGE)
    name = f"{hub.main}/data/a"
    first = hub.cdn
    async with open_transport(ROOT, retry=QUICK) as transport:
        pinned = transport.pinned("data/a")
        assert await pinned.read_ranges([(0, 4)]) == [LARGE[:4]]
        assert first.asked
        first.faults[name].append(status(403))
        elsewhere.put(name, LARGE, etag=etag)
        renamed: Any = Renamed(elsewhere, etag)
        hub.cdn = renamed
        assert await pinned.read_ranges([(4, 4)]) == [LARGE[4:8]]


async def test_listings_without_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that always name another are given up, and hold no memory for ever."""
    monkeypatch.setattr("asyncloader.transports.hugging_face._MOST_PAGES", 20)
    target = f"/api/datasets/acme/digits/tree/{hub.main}"
    number = 0

    async def page(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        hub.breaks[target].append(page)
        return web.json_response([], headers={"Link": f'<{hub.url}{target}?cursor={number}>; rel="next"'})

    hub.breaks[target].append(page)
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(ReadFailed, match="does not end"):
            await listed(transport)


async def test_a_page_that_is_missing(hub: Hub) -> None:
    """A folder is listed as a whole, or not at all: only its first page says that it does not exist."""
    for number in range(5):
        hub.put(f"train/part-{number}.jsonl", b"{}")
    target = f"/api/datasets/acme/digits/tree/{hub.main}/train"

    async def page(request: web.Request) -> web.StreamResponse | None:
        hub.breaks[target].append(page)
        return web.Response(status=404) if "cursor" in request.query else None

    hub.breaks[target].append(page)
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(ObjectNotFound, match="cursor=3' does not exist"):
            await listed(transport, "train/")


class Renamed:
    """A CDN whose objects have an ETag of its own."""

    def __init__(self, store: HttpStore, etag: str) -> None:
        self._store, self._etag = store, etag
        self.url = store.url

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data, etag=self._etag)
