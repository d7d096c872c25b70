"""Serve the files of a folder over HTTP, with a latency: a store that is far away, on this machine.

    python docs/examples/slow_store.py FOLDER MILLISECONDS

It writes its URL to standard output, and ends when standard input does. aiohttp's server answers HEAD and byte ranges
and sends ETags, as object stores do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler


def make_app(folder: Path, latency_s: float) -> web.Application:
    """The application: every answer begins `latency_s` seconds late."""

    @web.middleware
    async def late(request: web.Request, handler: Handler) -> web.StreamResponse:
        await asyncio.sleep(latency_s)
        return await handler(request)

    app = web.Application(middlewares=[late])
    app.router.add_static("/", folder)
    return app


async def serve(folder: Path, latency_s: float) -> None:
    """Serve until standard input ends."""
    runner = web.AppRunner(make_app(folder, latency_s), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"http://{host}:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.cleanup()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve a folder over HTTP with a latency.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("milliseconds", type=float)
    options = parser.parse_args()
    asyncio.run(serve(options.folder, options.milliseconds / 1000))


if __name__ == "__main__":
    main()
