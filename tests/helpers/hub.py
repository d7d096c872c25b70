"""A Hugging Face Hub on loopback: its API for datasets, and a CDN on another port, to which it redirects."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha1
from urllib.parse import quote, unquote

from aiohttp import web

from asyncloader.transports import RetryPolicy
from tests.helpers.http_store import Asked, HttpStore, serving

ROOT = "hf://datasets/acme/digits"
QUICK = RetryPolicy(budget_s=5.0, first_delay_s=0.001, cap_s=0.001)
TOKEN = "hf_loopbackSecretToken"  # of no real account
SIGNATURE = "Signature=cdnSecret"
PAGE = 3
"""Files of a page of a listing."""


Break = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class Hub:
    """A hub with one dataset, ``acme/digits``. Each `put` is a commit; `main` is the newest.

    Attributes:
        faults: answers to the next requests for a path, in place of the usual ones.
        breaks: functions that the next requests for a path call; what they return is the answer, unless it is None.
        asked: the requests that arrived.
        private: refuse requests without the token.
        large: files of at least this number of bytes are redirected to the CDN.
    """

    def __init__(self, cdn: HttpStore) -> None:
        self.cdn = cdn
        self.url = ""
        self.faults: defaultdict[str, deque[web.Response]] = defaultdict(deque)
        self.breaks: defaultdict[str, deque[Break]] = defaultdict(deque)
        self.asked: list[Asked] = []
        self.private = False
        self.large = 100
        self.commits: dict[str, dict[str, bytes]] = {}
        self.main = ""
        self._small = HttpStore()
        self.put("README.md", b"# digits")

    def put(self, path: str, data: bytes) -> str:
        """Commit a file. Returns the commit."""
        files = {**self.commits.get(self.main, {}), path: data}
        self.main = sha1(f"{len(self.commits)}".encode(), usedforsecurity=False).hexdigest()
        self.commits[self.main] = files
        return self.main

    def paths(self, kind: str) -> list[str]:
        """Return the paths of the requests of a kind: ``revision``, ``tree`` or ``resolve``."""
        return [asked.path for asked in self.asked if f"/digits/{kind}/" in asked.path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = unquote(request.rel_url.raw_path)
        self.asked.append(Asked(request.method, path, request.headers.copy(), request.rel_url.raw_query_string, 0))
        if self.breaks[path] and (answer := await self.breaks[path].popleft()(request)) is not None:
            return answer
        if self.faults[path]:
            return self.faults[path].popleft()
        if self.private and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        match path.split("/")[1:]:
            case ["api", "datasets", "acme", "digits", "revision", revision]:
                commit = self.main if revision == "main" else revision
                if commit not in self.commits:
                    return web.json_response({"error": "Invalid rev id"}, status=404)
                return web.json_response({"id": "acme/digits", "sha": commit})
            case ["api", "datasets", "acme", "digits", "tree", commit, *rest]:
                return self._tree(request, commit, "/".join(rest))
            case ["datasets", "acme", "digits", "resolve", commit, *rest]:
                return self._resolve(request, commit, "/".join(rest))
            case _:
                return web.json_response({"error": "Repository not found"}, status=404)

    def _tree(self, request: web.Request, commit: str, folder: str) -> web.Response:
        files = self.commits.get(commit, {})
        paths = sorted(path for path in files if path.startswith(f"{folder}/" if folder else ""))
        if commit not in self.commits or (folder and not paths):
            return web.json_response({"error": "not found"}, status=404)
        first = int(request.query.get("cursor", "0"))
        chosen = paths[first : first + PAGE]
        entries = [{"type": "file", "oid": "0" * 40, "size": len(files[path]), "path": path} for path in chosen]
        answer = web.json_response([*entries, {"type": "directory", "oid": "1" * 40, "size": 0, "path": "data"}])
        if first + PAGE < len(paths):
            address = f"{self.url}{request.rel_url.raw_path}?recursive=true&expand=false&cursor={first + PAGE}"
            answer.headers["Link"] = f'<{address}>; rel="next"'
        return answer

    def _resolve(self, request: web.Request, commit: str, path: str) -> web.StreamResponse:
        data = self.commits.get(commit, {}).get(path)
        if data is None:
            return web.json_response({"error": "Entry not found"}, status=404)
        name = f"{commit}/{path}"
        if len(data) < self.large:
            self._small.put(name, data)
            return self._small.answer(request, name)
        self.cdn.put(name, data)
        location = f"{self.cdn.url}/{quote(name)}?{SIGNATURE}"
        return web.Response(status=302, headers={"Location": location, "X-Repo-Commit": commit})


@asynccontextmanager
async def serving_hub() -> AsyncGenerator[Hub]:
    """Run a hub and its CDN, each on a free port of the loopback interface."""
    async with serving() as cdn:
        hub = Hub(cdn)
        app = web.Application(handler_args={"access_log": None})
        app.router.add_route("*", "/{path:.*}", hub.handle)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            hub.url = "http://{}:{}".format(*runner.addresses[0][:2])
            yield hub
        finally:
            await runner.cleanup()
