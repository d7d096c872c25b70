"""Malformed inputs, drawn from seeds: every reader of bytes from a network must refuse them.

    python -m tests.stress.wire --inputs 10000000    # 1 if anything went wrong

An input is a real message, or a real stream of messages, that was changed: bits, numbers at their limits, pieces cut,
doubled or taken from elsewhere, and values put into the decoded tree. A reader may raise ValueError. Any other
exception, unbounded memory, and 1,000 inputs that take longer than a minute are faults.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import random
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader.errors import RingMemoryError
from asyncloader.service.client.remote_channel import RemoteChannel
from asyncloader.service.node.admission import Served
from asyncloader.service.node.server import Node
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.handshake import Hello, Welcome, read_opening
from asyncloader.service.protocol.msgpack_codec import MSGPACK, BatchTemplate
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.service.protocol.records import DatasetInfo, pack_record, read_record
from asyncloader.service.protocol.shard_plan import Plan, read_request
from asyncloader.service.protocol.unpacking import unpack
from asyncloader.workers.ipc import wire
from tests.service import definitions
from tests.stress.wire_inputs import (
    CURSOR,
    MEMORY,
    REQUEST,
    SKIPPED,
    Original,
    answers,
    changed,
    conversations,
    hello,
    openings,
    split_template,
    templates,
    values,
    whole,
)

BLOCK = 1000
"""Inputs per seed."""
DEADLINE_S = 60.0
"""For a block. One input of a block that is too slow makes the process say where it is, and end."""
REFUSALS = (ValueError, RingMemoryError)
ENOUGH = 20
"""Faults after which a process stops."""
ADDRESS_SPACE = 3 << 30
"""Bytes of address space that a process may take besides what it has at its start."""


class Target(NamedTuple):
    """A reader of bytes from a network.

    Attributes:
        originals: real inputs.
        read: takes an input.
        weight: how many of 100 blocks it gets.
    """

    originals: Sequence[Original]
    read: Callable[[bytes], Any]
    weight: int


def _read_template(data: bytes) -> None:
    try:
        BatchTemplate(data).build(MEMORY)
    except TypeError as error:  # the consumer's error of a type's name that was changed
        if "only types that were registered" not in str(error):
            raise


def _read_as_loader(data: bytes) -> None:
    """A logical worker's channel with eight tasks gets this stream."""
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    channel = RemoteChannel(link)
    link.most_payload = 1 << 20  # batches may be large; here other messages are tested
    channel._tasks = {(0, task): (0, 0, 0.0) for task in range(8)}
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.sendall(data[: 1 << 17])
    try:
        while not channel.ended:
            for kind, body in channel.receive():
                _read_answer(kind, body)
    finally:
        channel.close()


def _read_answer(kind: int, body: bytes) -> None:
    """As the pool reads it."""
    if kind == wire.RESULT:
        wire.unpack_result(body)
    elif kind == wire.STARTED:
        _, error, cursors = wire.unpack_started(body)
        _ = error and MSGPACK.load_error(error), [MSGPACK.load_cursor(each) for each in cursors if each]
    elif kind == wire.ASK:
        MSGPACK.loads(wire.unpack_ask(body)[3])
    elif kind == wire.ERROR:
        MSGPACK.load_error(wire.unpack_answer(body)[3])


class OneNode:
    """A node in this process, to which streams are sent. Made in a process that has an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._node = Node([Served("tests.service.definitions:numbers", definitions.numbers, open=True)], 1)
        address = self.loop.run_until_complete(self._node.listen("tcp://127.0.0.1:0"))
        self._port = int(address.rpartition(":")[2])

    def read(self, data: bytes) -> None:
        """Send this to the node, and wait until it has closed the connection."""
        self.loop.run_until_complete(self._say(data))

    async def _say(self, data: bytes) -> None:
        with socket.socket() as sock, suppress(ConnectionError):
            sock.setblocking(False)
            await self.loop.sock_connect(sock, ("127.0.0.1", self._port))
            await self.loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            while await self.loop.sock_recv(sock, 1 << 16):
                pass

    def close(self) -> None:
        """End the node; no connection may be left in it."""
        self.loop.run_until_complete(self._node.close())
        left = self._node.figures()
        self.loop.close()
        assert (left["lanes"], left["sessions"]) == (0, 0)


def targets(node: OneNode | None) -> dict[str, Target]:
    """All readers of bytes from a network; those of a node only if one is given."""
    plan = Plan("0" * 16, ["a.tar", "b.tar"], [[(0, 0, 5, False), (1, 0, 3, True)], []], 80, 0.5)
    welcome = pack_record(Welcome(b"", DatasetInfo(False, 40, False, False)))
    error = MSGPACK.dump_error(ValueError("x"), 1)
    found = {
        "value": Target(values(), unpack, 25),
        "batch": Target([split_template(each) for each in templates()], _read_template, 25),
        "hello": Target(whole(hello("numbers", '{"n": 20}')), lambda data: read_record(Hello, data), 5),
        "welcome": Target(whole(welcome), lambda data: read_record(Welcome, data).checked_info(), 4),
        "opening": Target(whole(*openings()), read_opening, 10),
        "request": Target(whole(REQUEST), read_request, 4),
        "plan": Target(whole(pack_record(plan)), lambda data: read_record(Plan, data), 5),
        "error": Target(whole(error, MSGPACK.dump_error(RingMemoryError(1, 2, "x", "y"), 1)), MSGPACK.load_error, 5),
        "cursor": Target(whole(pack(tuple(CURSOR))), MSGPACK.load_cursor, 3),
        "records": Target(whole(pack([SKIPPED])), MSGPACK.load_records, 3),
        "answers": Target(answers(), _read_as_loader, 10),
    }
    if node is not None:
        found["conversation"] = Target(conversations(), node.read, 1)
    return found


class Found(NamedTuple):
    """A fault, and the data that reproduce it."""

    target: str
    seed: int
    data: str
    error: str


class Done(NamedTuple):
    """The result of a process."""

    inputs: Counter[str]
    refused: int
    faults: list[Found]


def read_block(rng: random.Random, target: Target) -> Iterator[tuple[bytes, Exception | None]]:
    """Draw inputs and have them read. Gives each, and the exception that it raised."""
    for _ in range(BLOCK):
        data = changed(rng, target.originals)
        try:
            target.read(data)
        except Exception as error:
            yield data, error
        else:
            yield data, None


def run(first: int, blocks: int, step: int, only: str | None = None) -> Done:
    """Draw the blocks of these seeds and have them read."""
    told = _Told()
    logging.getLogger("asyncloader").addHandler(told)
    logging.getLogger("asyncloader").setLevel(logging.INFO)
    logging.getLogger("asyncloader").propagate = False
    inputs: Counter[str] = Counter()
    refused, faults = 0, list[Found]()
    node = OneNode()
    everything = targets(node)
    names = [name for name, target in everything.items() for _ in range(target.weight)]
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, resource.RLIM_INFINITY))
    try:
        for seed in range(first, first + blocks * step, step):
            rng = random.Random(f"asyncloader wire {seed}")
            name = only or rng.choice(names)
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
            for data, error in read_block(rng, everything[name]):
                refused += isinstance(error, REFUSALS)
                if told.errors or (error is not None and not isinstance(error, REFUSALS)):
                    what = told.errors.pop() if told.errors else f"{type(error).__name__}: {error}"
                    faults.append(Found(name, seed, data.hex(), what))
            inputs[name] += BLOCK
            if len(faults) > ENOUGH:
                break
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
        node.close()
    return Done(inputs, refused, faults)


class _Told(logging.Handler):
    """Keeps the node's log lines about its own faults: an unexpected exception, a process that died."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or ("died" in text and "SIGKILL" not in text):  # a loader may have its process killed
            self.errors.append(f"{text}: {record.exc_info and record.exc_info[1]!r}")


def main(arguments: list[str]) -> int:
    """Run the inputs; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.wire", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many inputs (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s); one draws 1,000 inputs")
    parser.add_argument("--only", help="this reader alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    blocks = -(-options.inputs // BLOCK // options.jobs)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        running = [
            pool.submit(run, options.first + job, blocks, options.jobs, options.only) for job in range(options.jobs)
        ]
        done = [each.result() for each in running]
    inputs = sum((each.inputs for each in done), Counter[str]())
    faults = [fault for each in done for fault in each.faults]
    for fault in faults:
        sys.stdout.write(f"FAIL {fault.target}, seed {fault.seed}: {fault.error[:300]}\n     {fault.data[:600]}\n")
    told = ", ".join(f"{number:,} {name}" for name, number in sorted(inputs.items()))
    refused = sum(each.refused for each in done)
    seconds = time.monotonic() - began
    sys.stdout.write(f"{inputs.total():,} inputs, {refused:,} refused, {len(faults)} faults, {seconds:.0f} s; {told}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
