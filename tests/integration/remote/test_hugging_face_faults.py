"""A Hub, or what claims to be one, that refuses, breaks off, changes and lies: what is read is right, or an error that
says what to do.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader import RemoteIterableDataset, RemoteMapDataset
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


async def test_reasons_are_bounded(hub: Hub) -> None:
    """What claims to be a reason cannot fill a log, or hold control characters."""
    commit = hub.put("data/a", b"x")
    headers = {"X-Error-Message": "\t\xff" + "x" * 5000}
    hub.faults[f"/datasets/acme/digits/resolve/{commit}/data/a"].append(web.Response(status=403, headers=headers))
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(AccessDenied) as denied:
            await transport.read("data/a")
    assert "\t" not in str(denied.value)
    assert len(str(denied.value)) < 1000


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


@pytest.mark.parametrize("kind", ["revision", "tree"])
async def test_encoded_pages(hub: Hub, kind: str) -> None:
    """A page that is compressed although it was asked for as it is: an error that proposes no option that hf:// has
    not.
    """
    target = {"revision": "revision/main", "tree": f"tree/{hub.main}"}[kind]
    body = gzip.compress(json.dumps({"sha": hub.main}).encode())
    hub.faults[f"/api/datasets/acme/digits/{target}"].append(
        web.Response(body=body, headers={"Content-Encoding": "gzip"})
    )
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(ReadFailed, match=r"its bytes are encoded \('gzip'\)") as refused:
            await listed(transport)
    assert "encoded=" not in str(refused.value)


async def test_bodies_that_break_off(hub: Hub) -> None:
    """A listing and a file are asked for again, from where they broke off or from the beginning, and are whole."""
    for number in range(4):
        hub.put(f"data/{number}", bytes([number]) * 500)
    hub.large = 100

    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.content_length = 400
        await answer.prepare(request)
        await answer.write(b'[{"type": "file", "pa')
        assert request.transport is not None
        request.transport.abort()
        return answer

    hub.breaks[f"/api/datasets/acme/digits/tree/{hub.main}"].append(cut)
    hub.breaks["/api/datasets/acme/digits/revision/main"].append(cut)
    for number in range(4):
        hub.cdn.faults[f"{hub.main}/data/{number}"].append(broken(100 * number))
    async with open_transport(ROOT, retry=QUICK) as transport:
        assert await listed(transport, "data/") == [f"data/{number}" for number in range(4)]
        for number in range(4):
            assert await transport.read(f"data/{number}") == bytes([number]) * 500


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


@pytest.mark.parametrize("path", ["\ud800.jsonl", "a//b", "a\0", "./a"])
async def test_paths_that_no_file_has(hub: Hub, path: str) -> None:
    """A listing with such a path is refused."""
    answer = web.json_response([{"type": "file", "path": path, "size": 1}])
    hub.faults[f"/api/datasets/acme/digits/tree/{hub.main}"].append(answer)
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(ReadFailed, match="a path that is not valid"):
            await listed(transport)


async def test_a_huge_page_does_not_stop_the_loop(hub: Hub) -> None:
    """The loop runs while a page of a hundred thousand files is parsed."""
    files = [
        {"type": "file", "path": f"data/{number:06d}.jsonl", "size": 1, "oid": "0" * 40} for number in range(100_000)
    ]
    hub.faults[f"/api/datasets/acme/digits/tree/{hub.main}"].append(web.json_response(files))
    async with open_transport(ROOT, retry=QUICK) as transport:
        assert len(await listed(transport)) == 100_000


async def test_a_branch_that_moves(hub: Hub) -> None:
    """While its pages are read, and while its files are: all are of one commit."""
    for number in range(8):
        hub.put(f"train/part-{number}.jsonl", json.dumps({"n": number}).encode())
    commit = hub.main
    target = f"/api/datasets/acme/digits/tree/{commit}/train"

    async def move(request: web.Request) -> None:
        hub.put("train/part-9.jsonl", b'{"n": 9}')
        hub.put("train/part-0.jsonl", b'{"n": 10}')

    hub.breaks[target].append(move)
    dataset = RemoteIterableDataset(f"{ROOT}/train/")
    found = [sample["n"] async for sample in samples(dataset)]
    assert sorted(found) == [*range(8)]
    assert {quote(url, safe=":/@") for url in dataset.shard_urls} == {
        f"{ROOT}@{commit}/train/part-{number}.jsonl" for number in range(8)
    }


async def samples(dataset: RemoteIterableDataset) -> AsyncIterator[Any]:
    async with aclosing(aiter(dataset)) as found:
        async for sample in found:
            yield sample


class Renamed:
    """A CDN whose objects have an ETag of its own."""

    def __init__(self, store: HttpStore, etag: str) -> None:
        self._store, self._etag = store, etag
        self.url = store.url

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data, etag=self._etag)
