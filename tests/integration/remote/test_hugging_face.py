"""Datasets of the Hugging Face Hub: listed once, read at one commit, and no secret leaves for another server."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncloader import AsyncDataLoader, RemoteIterableDataset, RemoteMapDataset, StateError
from asyncloader.formats import ShardError
from asyncloader.transports import (
    AccessDenied,
    HuggingFaceTransport,
    ObjectNotFound,
    ReadFailed,
    open_transport,
)
from tests.helpers.http_store import status
from tests.helpers.hub import QUICK, ROOT, SIGNATURE, TOKEN, Hub

pytestmark = pytest.mark.network


def lines(first: int, count: int = 20) -> bytes:
    return b"".join(json.dumps({"n": first + each}).encode() + b"\n" for each in range(count))


async def read_all(dataset: RemoteIterableDataset, **options: Any) -> list[int]:
    async with AsyncDataLoader[Any](dataset, batch_size=7, collate_fn=list, **options) as loader:
        return sorted(
            [
                json.loads(sample["n"]) if isinstance(sample["n"], bytes) else sample["n"]
                async for batch in loader
                for sample in batch
            ]
        )


@pytest.mark.parametrize(
    "url",
    [f"{ROOT}/train/", f"{ROOT}/train/*.jsonl", f"{ROOT}/**/part-*.jsonl", f"{ROOT}@main/train/part-{{0..4}}.jsonl"],
)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}], ids=["0", "2"])
async def test_every_way_in(hub: Hub, url: str, options: dict[str, Any]) -> None:
    """Prefixes, patterns and names: all samples, from one commit, which was asked for once; the sizes that a listing
    says are not asked for again.
    """
    for number in range(5):
        hub.put(f"train/part-{number}.jsonl", lines(20 * number))
    hub.put("test/part-9.tar", b"")
    dataset = RemoteIterableDataset(url)
    plan = await dataset.plan(2, 0, 1, None)
    assert plan.assignments
    assert hub.paths("revision") == ["/api/datasets/acme/digits/revision/main"]
    hub.put("train/part-0.jsonl", lines(1000))
    assert await read_all(dataset, **options) == [*range(100)]
    assert hub.paths("revision") == ["/api/datasets/acme/digits/revision/main"]
    listed = "*" in url or url.endswith("/")
    assert len(hub.paths("tree")) == (2 if listed and "**" not in url else 3 if listed else 0)
    if listed:
        assert not [asked for asked in hub.asked if asked.method == "HEAD"]


async def test_a_resumed_run_reads_the_commit_that_it_names(hub: Hub) -> None:
    """The URL of a shard has the commit; a commit in the URL is not asked for."""
    for number in range(3):
        hub.put(f"train/part-{number}.jsonl", lines(20 * number))
    commit = hub.main
    hub.put("train/part-0.jsonl", lines(1000))
    dataset = RemoteIterableDataset(f"{ROOT}@{commit}/train/")
    assert await read_all(dataset) == [*range(60)]
    assert dataset.shard_urls == [f"{ROOT}@{commit}/train/part-{number}.jsonl" for number in range(3)]
    assert hub.paths("revision") == []


@pytest.mark.parametrize("kind", ["stream", "fixed streams", "random access"])
async def test_a_cdn_that_sends_half_of_a_file(hub: Hub, kind: str) -> None:
    """The listing says how many bytes it has: lines that are missing are an error, also where a line ends."""
    commit = hub.put("train/part-0.jsonl", lines(0))
    path = f"/datasets/acme/digits/resolve/{commit}/train/part-0.jsonl"

    async def cut(_: web.Request) -> web.StreamResponse:
        hub.cdn.put("half", lines(0, 10))
        return web.Response(status=302, headers={"Location": f"{hub.cdn.url}/half", "X-Repo-Commit": commit})

    hub.breaks[path].extend([cut] * 30)
    dataset: Any = RemoteIterableDataset(f"{ROOT}/train/", streams=1 if kind == "fixed streams" else None)
    if kind == "random access":
        dataset = RemoteMapDataset(f"{ROOT}/train/")

    async def read() -> None:
        if kind == "random access":
            await dataset.prepare()
        async with AsyncDataLoader[Any](dataset, batch_size=None, seed=1) as loader:
            async for _ in loader:
                pass

    with pytest.raises(ShardError, match=r"its listing.* says that it has \d+ bytes"):
        await read()


async def test_a_random_access_that_is_resumed_on_a_branch_that_moved(hub: Hub) -> None:
    """Is refused within an epoch; the commit goes on."""
    commit = hub.put("train/part-0.jsonl", lines(0))

    async def resume(url: str, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[int]]:
        dataset = RemoteMapDataset(url)
        await dataset.prepare()
        async with AsyncDataLoader[Any](dataset, batch_size=5, collate_fn=list, shuffle=True, seed=1) as loader:
            loader.load_state_dict(state or {})
            samples = []
            async for batch in loader:
                samples += [sample["n"] for sample in batch]
                if state is None:
                    break
            return loader.state_dict(), samples

    state, first = await resume(f"{ROOT}@main/train/", None)
    hub.put("train/part-0.jsonl", lines(1000))
    with pytest.raises(StateError, match=r"within an epoch of other data.*name@commit"):
        await resume(f"{ROOT}@main/train/", state)
    assert sorted(first + (await resume(f"{ROOT}@{commit}/train/", state))[1]) == [*range(20)]


async def test_a_cache_serves_the_next_epoch(hub: Hub, tmp_path: Path) -> None:
    """Files of a commit do not change: with `cache_revalidate=False` neither the Hub nor the CDN is asked again."""
    hub.put("train/part-0.jsonl", lines(0, 100))
    dataset = RemoteIterableDataset(f"{ROOT}/train/", cache_dir=tmp_path, cache_revalidate=False)
    assert await read_all(dataset) == [*range(100)]
    asked = len(hub.asked), len(hub.cdn.asked)
    assert await read_all(dataset) == [*range(100)]
    assert (len(hub.asked), len(hub.cdn.asked)) == asked


async def test_the_token_goes_to_the_hub_alone(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Not to the CDN, nor into a pickle, a text, an error or the log. Redirects are used again, until they fail."""
    caplog.set_level(logging.DEBUG)
    hub.private = True
    hub.put("data/large file?#.bin", bytes(range(256)) * 8)
    async with open_transport(ROOT, retry=QUICK) as transport:
        path = "data/large file?#.bin"
        assert await transport.read_range(path, 256, 3) == b"\0\1\2"
        assert await transport.read_ranges(path, [(0, 2), (2000, 2)]) == [b"\0\1", b"\xd0\xd1"]
        assert await transport.size(path) == 2048
        assert len(hub.paths("resolve")) == 1
        hub.cdn.faults[f"{hub.main}/{path}"].append(status(403))  # the signature has expired
        assert await transport.read_range(path, 1, 1) == b"\1"
        assert len(hub.paths("resolve")) == 2
        hub.cdn.faults[f"{hub.main}/{path}"].extend([status(403)] * 2)
        with pytest.raises(AccessDenied) as denied:
            await transport.read_range(path, 1, 1)
        with pytest.raises(ObjectNotFound):
            await transport.read("data/none")
        assert isinstance(transport, HuggingFaceTransport)
        texts = [repr(transport), str(denied.value), repr(pickle.dumps(transport)), caplog.text]
        copy = pickle.loads(pickle.dumps(transport))
    async with copy:
        assert await copy.read_range(path, 0, 1) == b"\0"
    assert not [text for text in texts if TOKEN in text or SIGNATURE in text]
    assert all(asked.headers["Authorization"] == f"Bearer {TOKEN}" for asked in hub.asked)
    assert hub.cdn.asked
    assert not [asked for asked in hub.cdn.asked if "Authorization" in asked.headers or TOKEN in str(asked)]


@pytest.mark.parametrize("token", [TOKEN, "hf_wrong", None])
async def test_private_datasets(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    """Without the right token the error says what to do, and not which token was sent."""
    hub.private = True
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    async with open_transport(ROOT, retry=QUICK) as transport:
        if token == TOKEN:
            assert await transport.read("README.md") == b"# digits"
            return
        with pytest.raises(AccessDenied, match=r"gives it to others only .*set HF_TOKEN") as denied:
            await transport.read("README.md")
        assert ("a token was sent" if token else "no token was found") in str(denied.value)
        assert token is None or token not in str(denied.value)


@pytest.mark.parametrize("root", [f"{ROOT}@none", "hf://datasets/acme/none"])
async def test_what_does_not_exist(hub: Hub, root: str) -> None:
    """A dataset or revision that does not exist is an error; a folder that does not is empty."""
    async with open_transport(root, retry=QUICK) as transport:
        with pytest.raises(ObjectNotFound, match="no such dataset or revision"):
            await transport.read("a")
    async with open_transport(ROOT, retry=QUICK) as transport, aclosing(transport.list("none/")) as paths:
        assert [path async for path in paths] == []


@pytest.mark.parametrize(
    "header", [{"Retry-After": "1"}, {"RateLimit": '"api";r=0;t=1'}], ids=["Retry-After", "RateLimit"]
)
@pytest.mark.parametrize("kind", ["revision", "tree", "resolve"])
async def test_limits_on_requests(hub: Hub, kind: str, header: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is refused with 429 is sent again, not before the time that the Hub names."""
    commit = hub.put("data/a", bytes(500))
    target = {
        "revision": "/api/datasets/acme/digits/revision/main",
        "tree": f"/api/datasets/acme/digits/tree/{commit}",
        "resolve": f"/datasets/acme/digits/resolve/{commit}/data/a",
    }[kind]
    hub.faults[target].extend(web.Response(status=429, headers=header) for _ in range(2))
    waits: list[float] = []

    async def sleep(seconds: float, result: Any = None) -> Any:
        waits.append(seconds)
        return result

    async with open_transport(ROOT, retry=QUICK) as transport:
        assert isinstance(transport, HuggingFaceTransport)
        monkeypatch.setattr(transport._client, "sleep", sleep)
        async with aclosing(transport.list()) as paths:
            assert [path async for path in paths] == ["README.md", "data/a"]
        assert await transport.read("data/a") == bytes(500)
        assert transport.retries.kinds["status 429"] == 2
    assert len([seconds for seconds in waits if seconds >= 1]) == 2


async def test_concurrent_first_reads_ask_for_the_commit_once(hub: Hub) -> None:
    """Also with one request at a time, and if the first caller is cancelled."""
    for requests in (1, 8):
        async with open_transport(ROOT, requests=requests) as transport:
            before = len(hub.paths("revision"))
            reads = [asyncio.ensure_future(transport.read("README.md")) for _ in range(10)]
            await asyncio.sleep(0)
            reads[0].cancel()
            found = await asyncio.gather(*reads, return_exceptions=True)
            assert found[1:] == [b"# digits"] * 9
            assert len(hub.paths("revision")) - before <= 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("{}", "answered without a list"),
        ('[{"type": "file", "path": "../../etc", "size": 1}]', "a path that is not valid"),
        ("<html>", "did not answer with JSON"),
    ],
)
async def test_hostile_listings(hub: Hub, answer: str, said: str) -> None:
    """What is no listing is an error, not a crash or a path outside of the dataset."""
    hub.faults[f"/api/datasets/acme/digits/tree/{hub.main}"].append(web.Response(text=answer))
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(ReadFailed, match=said):
            async with aclosing(transport.list()) as paths:
                _ = [path async for path in paths]


@pytest.mark.parametrize("kind", ["endless", "elsewhere"])
async def test_pages_that_lead_astray(hub: Hub, kind: str) -> None:
    """A next page that is an earlier one, or of another server, is refused."""
    target = f"/api/datasets/acme/digits/tree/{hub.main}"
    link = f"{hub.url}{target}?recursive=true&expand=false" if kind == "endless" else f"{hub.cdn.url}/x"
    hub.faults[target].extend(web.json_response([], headers={"Link": f'<{link}>; rel="next"'}) for _ in range(3))
    async with open_transport(ROOT, retry=QUICK) as transport:
        with pytest.raises(ReadFailed, match="comes again" if kind == "endless" else "not of the same server"):
            async with aclosing(transport.list()) as paths:
                _ = [path async for path in paths]


def test_arguments() -> None:
    """What is no option of these transports is refused."""
    with pytest.raises(ValueError, match="is not the root of a dataset"):
        HuggingFaceTransport(f"{ROOT}/data/a")
    with pytest.raises(TypeError, match="headers is not an option"):
        HuggingFaceTransport(ROOT, headers={"Authorization": "x"})
    with pytest.raises(TypeError, match=r"^token is not an option .* set HF_TOKEN.*login`$"):  # and not its value
        HuggingFaceTransport(ROOT, token="hf_secret")
    for endpoint in (5, b"https://huggingface.co"):
        with pytest.raises(TypeError, match=r"endpoint=.* is no address: give a string"):
            HuggingFaceTransport(ROOT, endpoint=endpoint)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="requests='many' is no number"):
        HuggingFaceTransport(ROOT, requests="many")  # type: ignore[arg-type]
