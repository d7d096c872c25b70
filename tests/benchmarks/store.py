"""A store on the loopback interface, in a process of its own: the files of a folder by HTTP/1.1, with a latency.

It does as little as it can, because client and store share the machine's cores, and the client is measured:
no framework, content without copies, connections that stay open. The latency is in the address
(``/50/0000.tar`` takes 50 ms until the first byte), so that one store serves every row.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .harness import ROOT

ADDRESS = re.compile(rb"(GET|HEAD) (?:http://[^/ ]+)?/(\d+)/([\w.]+) HTTP/1\.1\r\n", re.IGNORECASE)
RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
START_S = 30.0  # in which a store must have started


class Answers(asyncio.Protocol):
    """One connection: a request, its latency, the answer, the next request.

    Args:
        files: by their names.
        loop: of the connection.
    """

    def __init__(self, files: dict[str, memoryview], loop: asyncio.AbstractEventLoop) -> None:
        self._files = files
        self._loop = loop
        self._transport: Any = None
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._asked += data
        if self._asked.endswith(b"\r\n\r\n"):  # clients that wait for an answer before they ask again
            asked, self._asked = self._asked, b""
            match = ADDRESS.match(asked)
            if match is None:
                self._transport.write(MISSING)
            else:
                self._loop.call_later(int(match[2]) / 1000, self._answer, match, RANGE.search(asked))

    def _answer(self, match: re.Match[bytes], wanted: re.Match[bytes] | None) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        name = match[3].decode()
        content = self._files.get(name)
        if content is None:
            self._transport.write(MISSING)
            return
        size = len(content)
        start, end, status = 0, size, b"200 OK"
        if wanted is not None:
            start, end = int(wanted[1]), min(size, int(wanted[2] or size) + 1)
            status = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (start, end - 1, size)
        if start >= end:
            status = b"416 Range Not Satisfiable\r\nContent-Range: bytes */%d" % size
            start = end = 0
        head = b'HTTP/1.1 %s\r\nETag: "%s"\r\nContent-Length: %d\r\n\r\n' % (status, match[3], end - start)
        body = b"" if match[1] == b"HEAD" else content[start:end]
        self._transport.writelines([head, body])


async def serve(files: dict[str, memoryview]) -> None:
    """Serve until standard input ends; the port is written to standard output."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answers(files, loop), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)  # never written to: readable means its end
    await ended.wait()


@contextmanager
def running_store(folder: Path) -> Generator[str]:
    """Run a store of a folder in a process of its own, which ends with this process; gives its URL, without a ``/``
    at the end.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "tests.benchmarks.store", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the store ended with {process.wait(START_S)} instead of starting")
            yield f"http://127.0.0.1:{int(line)}"
        finally:
            process.stdin.close()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    import uvloop

    contents = {path.name: memoryview(path.read_bytes()) for path in Path(sys.argv[1]).iterdir()}
    uvloop.run(serve(contents))
