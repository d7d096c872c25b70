"""Inputs that nobody sane sends, drawn from seeds: all that reads what came over a network must refuse them.

    python -m tests.stress.wire --inputs 10000000    # 1 if anything went wrong

An input is a real message, or a real stream of messages, that was changed: bits, numbers at their limits, pieces cut,
doubled or taken from elsewhere, and values put into the decoded tree. Whatever reads it may raise ValueError. Anything
else that it raises, memory that it takes without measure, and a second that it does not come back in is a fault.
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

import msgspec
import numpy as np
import torch

from asyncloader.errors import RingMemoryError
from asyncloader.events import PositionedIndex
from asyncloader.service import frames
from asyncloader.service.batches import BatchEncoder, BatchTemplate
from asyncloader.service.dialect import PLAIN
from asyncloader.service.frames import pack_header
from asyncloader.service.handshake import PROTOCOL, Hello, Welcome, pack_opening, read_opening, read_record
from asyncloader.service.lane_host import Facts
from asyncloader.service.link import Link
from asyncloader.service.node import Node
from asyncloader.service.remote_channel import RemoteChannel
from asyncloader.service.served_definitions import Served
from asyncloader.service.served_shards import Catalog, Plan, PlanRequest, gathered, messages, read_request
from asyncloader.service.values import pack, unpack
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.sample_errors import ErrorPolicy, SkippedSample
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.ipc import wire
from tests.service import definitions

BLOCK = 1000
"""Inputs that one seed draws."""
DEADLINE_S = 60.0
"""For a block. One input of a block that is too slow makes the process say where it is, and end."""
REFUSALS = (ValueError, RingMemoryError)
ENOUGH = 20
"""Faults after which a process stops."""
MEMORY = 3 << 30
"""Bytes of address space that a process may take besides what it has at its start."""


class Original(NamedTuple):
    """A real message, or a stream of them, in parts that can be changed before they are put together."""

    parts: tuple[bytes, ...]
    joined: Callable[[Sequence[bytes]], bytes]


class Target(NamedTuple):
    """Something that reads what came over a network.

    Attributes:
        originals: real inputs.
        read: takes an input.
        weight: how many of 100 blocks it gets.
    """

    originals: Sequence[Original]
    read: Callable[[bytes], Any]
    weight: int


# ------------------------------------------------------------------------------------------------------- changes

_NUMBERS = [0, 1, 2, 15, 16, 17, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 1 << 31, (1 << 31) - 1, (1 << 32) - 1]
_NUMBERS += [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "float32",
    "int64",
    "<i8",
    "<f4",
]
_VALUES += [b"", b"\x00" * 9, [], [0], [1], {}, [15, 0], [9, "Cursor"], "0x" + "f" * 40, "é\u0000", "M8[ns]", "|O"]
_VALUES += _NUMBERS


def changed(rng: random.Random, originals: Sequence[Original]) -> bytes:
    """An input: one of these, changed."""
    original = rng.choice(originals)
    parts = list(original.parts)
    if rng.random() < 0.75:
        number = rng.randrange(len(parts))
        for _ in range(rng.choice([1, 1, 2])):
            parts[number] = (_tree_changed if rng.random() < 0.6 else _bytes_changed)(rng, parts[number], originals)
        if rng.random() < 0.7:
            return original.joined(parts)
    if rng.random() < 0.1:
        rng.shuffle(parts)
    return _bytes_changed(rng, original.joined(parts), originals)


def _bytes_changed(rng: random.Random, data: bytes, originals: Sequence[Original]) -> bytes:
    if not data:
        return rng.randbytes(rng.randrange(9))
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, kind = rng.randrange(len(made) + 1), rng.randrange(7)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xDC, 0xDD, 0xFF))
        elif kind == 2:
            size = rng.choice((2, 4, 8))
            made[at : at + size] = (rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif kind == 3:
            del made[at:]
        elif kind == 4:
            del made[at : at + rng.randrange(1, 17)]
        elif kind == 5:
            end = at + rng.randrange(1, 33)
            made[at:at] = made[at:end]
        else:
            other = b"".join(rng.choice(originals).parts)
            begin = rng.randrange(len(other) + 1)
            made[at : at + rng.randrange(17)] = other[begin : begin + rng.randrange(65)]
    return bytes(made)


def _tree_changed(rng: random.Random, data: bytes, originals: Sequence[Original]) -> bytes:
    try:
        tree = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _bytes_changed(rng, data, originals)
    holder: list[Any] = [tree]
    while True:  # walk down to a place
        at = rng.randrange(len(holder))
        inner = holder[at]
        if type(inner) is not list or not inner or rng.random() < 0.15:
            break
        holder = inner
    kind, top = rng.randrange(6), holder[0] is tree
    if kind < 4 or top:
        holder[at] = rng.choice(_VALUES)
        if kind == 3:
            holder[at] = [rng.randrange(18), holder[at]]
        if top:
            tree = holder[0]
    elif kind == 4:
        del holder[at]
    else:
        holder.insert(at, rng.choice(_VALUES) if rng.random() < 0.5 else inner)
    return msgspec.msgpack.encode(tree)


# --------------------------------------------------------------------------------------------------- what is sent


def _whole(*data: bytes) -> list[Original]:
    return [Original((each,), b"".join) for each in data]


class Frame(NamedTuple):
    """The rest of a message, beside its body."""

    kind: int
    epoch: int = 0
    task: int = 0
    payload: bytes = b""


def _stream(*sent: tuple[Frame, bytes]) -> Original:
    heads = [frame for frame, _ in sent]

    def joined(bodies: Sequence[bytes]) -> bytes:
        return b"".join(
            pack_header(head.kind, len(body), head.epoch, head.task, len(head.payload)) + body + head.payload
            for head, body in zip(heads, bodies, strict=True)
        )

    return Original(tuple(body for _, body in sent), joined)


_CURSOR = Cursor(7, 3, ended=True, dataset={"at": 3, "rng": torch.arange(4)}, iterator=[1, (2, "x")])
_SKIPPED = SkippedSample(3, None, 1, 77, "ValueError: bad", "Traceback …", "refilled", 4)


def _values() -> list[Original]:
    sparse = torch.eye(3).to_sparse()
    plain: dict[str, Any] = {"a": [1, (2.5, None)], "b": {3, 4}, "c": b"\x00\x01", "d": 1 << 80, "e": 1j}
    array = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array("1970", "M8[ns]"),
        np.array(["ab", "c"]),
        np.float32(1),
    ]
    tensors = [torch.arange(4.0), torch.zeros(2, 0, dtype=torch.bfloat16), sparse, torch.eye(3).to_sparse_csr()]
    ours = [
        _CURSOR,
        _SKIPPED,
        PositionedIndex(3, 4),
        torch.Size([2, 3]),
        torch.float16,
        frozenset([1]),
        bytearray(b"x"),
    ]
    return _whole(*(pack(each) for each in ([1, 2, 3], plain, array, tensors, ours, [[[[[[0]]]]]])))


_BATCHES: list[Any] = [
    {"index": torch.arange(8), "noise": torch.rand(8, 50), "name": ["a", "b"]},
    (torch.rand(4, 6).T, np.asfortranarray(np.ones((3, 5))), torch.rand(3, 4)[:, 1:3]),
    [torch.tensor(3), torch.empty(0, 3), torch.eye(4).to_sparse(), np.arange(3, dtype=np.complex64)],
    definitions.Pair(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), torch.ones(3, dtype=torch.bool)),
    ["x" * (1 << 16)],  # inside the slot
]
_MEMORY = np.zeros(1 << 17, np.uint8)


def _templates() -> list[bytes]:
    return [BatchEncoder().encode(batch).template for batch in _BATCHES]


def _split_template(template: bytes) -> Original:
    size = int.from_bytes(template[:4], "little")

    def joined(parts: Sequence[bytes]) -> bytes:
        return len(parts[0]).to_bytes(4, "little") + parts[0] + parts[1]

    return Original((template[4 : 4 + size], template[4 + size :]), joined)


def _setup() -> WorkerSetup:
    return WorkerSetup(
        dataset=None,
        iterable=False,
        auto_collation=True,
        batch_size=4,
        drop_last=False,
        collate_fn=None,
        worker_init_fn=None,
        base_seed=7,
        num_workers=2,
        concurrency=0,
        snapshot_every=0,
        starts=[EpochStart(epoch_set=True)] * 2,
        seeded=SeededSetup(3, 1, 0, seed_collate=False),
        policy=ErrorPolicy("skip", refill=True, length=20, seed=3),
    )


def _hello(name: str, arguments: str = "{}") -> bytes:
    fingerprint = getattr(definitions, name).fingerprint()
    return pack(tuple(Hello(PROTOCOL, name, arguments, fingerprint, *Hello.versions(), bytes(32))))


def _openings() -> list[bytes]:
    catalog = Catalog(2, 1, "0" * 16)
    return [
        pack_opening("loader", 1, 8, _setup(), share=False),
        pack_opening("loader", 0, 8, _setup(), share=True),
        pack_opening("loader", 0, 8, _setup()._replace(policy=None), share=False, catalog=catalog),
    ]


_REQUEST = pack(tuple(PlanRequest(2, 0, 1, 5, True, "")))


def _sessions() -> list[Original]:
    """What a loader says from the beginning to the end. Without a token its proof is the same for every connection."""
    begun = [(Frame(frames.HELLO), _hello("numbers", '{"n": 20}')), (Frame(frames.PROOF), pack((b"",)))]
    started = pack(tuple(EpochStart(epoch=1, epoch_set=True)))
    tasks = [(Frame(wire.TASK, 0, task), pack([0, 1 + task, 2])) for task in range(3)]
    again = [(Frame(wire.RESET), wire.pack_reset(wire.RESET, 1, started)[wire.PREFIX_BYTES :])]
    again += [(Frame(wire.TASK, 1, 0), pack([0, 1]))]
    ends = [(Frame(wire.STOP), b"")]
    answer = [(Frame(wire.ASSIGNMENT), wire.pack_assignment(0, 1, pack([(0, 0, 1)]))[wire.PREFIX_BYTES :])]
    made = [_stream(*begun, (Frame(frames.OPENING), each), *tasks, *again, *answer, *ends) for each in _openings()]
    made.append(_stream(*begun, (Frame(frames.PLAN), _REQUEST)))
    made.append(_stream(*begun, (Frame(frames.LOOK), pack([1, 2]))))
    made.append(_stream(*begun, (Frame(frames.STAY), b""), (Frame(frames.PING), b"")))
    return made


def _answers() -> list[Original]:
    """What a node says of the tasks that `_read_as_loader` gives it."""
    told = [
        (Frame(wire.READY), b""),
        (Frame(wire.STARTED), wire.pack_started(0, b"", pack(_CURSOR))[wire.PREFIX_BYTES :]),
    ]
    for task, batch in enumerate(_BATCHES):
        encoded = BatchEncoder().encode(batch)
        result = wire.Result(0, task, 0, encoded.nbytes, 0, 8, 0.1, same=False, cursor=0)
        body = wire.pack_result(result, encoded.template)[wire.PREFIX_BYTES :]
        told.append((Frame(wire.RESULT, 0, task, bytes(encoded.nbytes)), body))
    error = PLAIN.dump_error(KeyError("x"), 1)
    answers = [(wire.BAD_SAMPLES, pack([_SKIPPED])), (wire.ERROR, error), (wire.ALL_DROPPED, pack([_SKIPPED]))]
    answers.append((wire.EXHAUSTED, pack(_CURSOR)))
    failed = [(Frame(kind), wire.pack_answer(kind, 0, 7, 0.1, body)[wire.PREFIX_BYTES :]) for kind, body in answers]
    asks = [(Frame(wire.ASK), wire.pack_ask(0, 1, 2, pack([1]))[wire.PREFIX_BYTES :]), (Frame(frames.PONG), b"")]
    reset = [(Frame(wire.RESET_DONE), wire.pack_reset(wire.RESET_DONE, 1)[wire.PREFIX_BYTES :])]
    died = [(Frame(frames.DIED), pack((1, -9, "killed", "", True, False)))]
    return [_stream(*told), _stream(*told[:4], *failed), _stream(*told[:2], *asks, *reset, *died)]


# ------------------------------------------------------------------------------------------------ what reads them


def _read_template(data: bytes) -> None:
    BatchTemplate(data).build(_MEMORY)


def _read_plan(data: bytes) -> None:
    sent = iter([data, pack((2, "end"))])
    gathered(lambda: next(sent))


def _read_as_loader(data: bytes) -> None:
    """A logical worker's channel with eight tasks gets this stream."""
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    channel = RemoteChannel(link)
    link.most_payload = 1 << 20  # a batch may be large, and this is about what is no batch
    channel._tasks = {(0, task): (0, 0) for task in range(8)}
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
        _, error, cursor = wire.unpack_started(body)
        _ = error and PLAIN.load_error(error), cursor and PLAIN.to_pickle(cursor)
    elif kind == wire.ASK:
        PLAIN.loads(wire.unpack_ask(body)[3])
    elif kind == wire.ERROR:
        PLAIN.load_error(wire.unpack_answer(body)[3])


class OneNode:
    """A node in this process, to which streams are sent. Made in a process that has an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._node = Node([Served("tests.service.definitions:numbers", definitions.numbers, open=True)], 1)
        address = self.loop.run_until_complete(self._node.listen("tcp://127.0.0.1:0"))
        self._port = int(address.rpartition(":")[2])

    def read(self, data: bytes) -> None:
        """Say this to the node, and wait until it has closed the connection."""
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
        """End the node; nobody may be left in it."""
        self.loop.run_until_complete(self._node.close())
        left = self._node.figures()
        self.loop.close()
        assert (left["lanes"], left["sessions"]) == (0, 0)


def targets(node: OneNode) -> dict[str, Target]:
    """All that reads what came over a network."""
    plan = Plan("0" * 16, ["a.tar", "b.tar"], [[(0, 0, 5), (1, 0, 3)], []])
    welcome = pack(tuple(Welcome(b"", tuple(Facts(False, 40, False, False)))))
    error = PLAIN.dump_error(ValueError("x"), 1)
    return {
        "value": Target(_values(), unpack, 25),
        "batch": Target([_split_template(each) for each in _templates()], _read_template, 25),
        "hello": Target(_whole(_hello("numbers", '{"n": 20}')), lambda data: read_record(Hello, data).checked(), 5),
        "welcome": Target(_whole(welcome), lambda data: read_record(Welcome, data).checked_facts(), 4),
        "opening": Target(_whole(*_openings()), read_opening, 10),
        "request": Target(_whole(_REQUEST), read_request, 4),
        "plan": Target(_whole(*messages(plan)), _read_plan, 5),
        "error": Target(_whole(error, PLAIN.dump_error(RingMemoryError(1, 2, "x", "y"), 1)), PLAIN.load_error, 5),
        "cursor": Target(_whole(pack(_CURSOR), pack([_SKIPPED])), PLAIN.to_pickle, 6),
        "answers": Target(_answers(), _read_as_loader, 10),
        "session": Target(_sessions(), node.read, 1),
    }


class Found(NamedTuple):
    """A fault, and what it takes to see it again."""

    target: str
    seed: int
    data: str
    error: str


class Done(NamedTuple):
    """What a process did."""

    inputs: Counter[str]
    refused: int
    faults: list[Found]


def read_block(rng: random.Random, target: Target) -> Iterator[tuple[bytes, Exception | None]]:
    """Draw inputs and have them read. Gives each, and what was raised."""
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
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))
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
    """Keeps what the node says of its own faults: an exception that it did not expect, a process that died."""

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
