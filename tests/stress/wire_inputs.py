"""Real messages of a service's wire, and the changes that make them malformed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from asyncloader.base.events import Cursor, PositionedIndex, SkippedSample
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.frames import pack_header
from asyncloader.service.protocol.handshake import PROTOCOL, Hello, Proof, pack_opening
from asyncloader.service.protocol.msgpack_codec import MSGPACK, BatchEncoder
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.service.protocol.records import DeathReport, pack_record
from asyncloader.service.protocol.shard_plan import Catalog, PlanRequest
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.ipc import wire
from tests.service import definitions


class Original(NamedTuple):
    """A real message, or a stream of them, in parts that can be changed before they are put together."""

    parts: tuple[bytes, ...]
    joined: Callable[[Sequence[bytes]], bytes]


# ------------------------------------------------------------------------------------------------------- changes

_NUMBERS = (
    *(0, 1, 2, 15, 16, 17, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000),
    *(number for bits in (31, 32, 40, 63) for number in ((1 << bits) - 1, 1 << bits)),
    (1 << 64) - 1,
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 1e308, float("nan"), float("inf"), b"", b"\x00" * 9, [], [0], [1], {}, [15, 0]),
    *("", "x", "float32", "int64", "<i8", "<f4", "0x" + "f" * 40, "é\u0000", "M8[ns]", "|O", [9, "Cursor"]),
    *("qint8", "quint4x2", "bits8", "uint8", Ext(0, b"1234"), Ext(0, b""), Ext(1, b"x"), {1: 2}),
    *([12, "qint8", [1, 4], Ext(0, b"1234")], [7, [12, "uint8", [1, 1], Ext(0, b"1")], 0.0]),
    *([3, *[[6, hex(7 + k * ((1 << 61) - 1))] for k in range(64)]], [2, [1, 1], 2], [[]] * 200),
    *_NUMBERS,
)


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


# -------------------------------------------------------------------------------------------------- real messages


def whole(*data: bytes) -> list[Original]:
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


CURSOR = Cursor(7, 3, ended=True, dataset={"at": 3, "rng": torch.arange(4)}, iterator=[1, (2, "x")])
SKIPPED = SkippedSample(3, None, 1, 77, "ValueError: bad", "Traceback …", "refilled", 4)


def values() -> list[Original]:
    plain: dict[str, Any] = {"a": [1, (2.5, None)], "b": {3, 4}, "c": b"\x00\x01", "d": 1 << 80, "e": 1j}
    array = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array("1970", "M8[ns]"),
        np.array(["ab", "c"]),
        np.float32(1),
    ]
    tensors = [torch.arange(4.0), torch.zeros(2, 0, dtype=torch.bfloat16)]
    ours = [
        CURSOR,
        SKIPPED,
        PositionedIndex(3, 4),
        torch.Size([2, 3]),
        torch.float16,
        frozenset([1]),
        bytearray(b"x"),
    ]
    return whole(*(pack(each) for each in ([1, 2, 3], plain, array, tensors, ours, [[[[[[0]]]]]])))


_BATCHES: list[Any] = [
    {"index": torch.arange(8), "noise": torch.rand(8, 50), "name": ["a", "b"]},
    (torch.rand(4, 6).T, np.asfortranarray(np.ones((3, 5))), torch.rand(3, 4)[:, 1:3]),
    [torch.tensor(3), torch.empty(0, 3), np.arange(3, dtype=np.complex64)],
    definitions.Pair(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), torch.ones(3, dtype=torch.bool)),
    ["x" * (1 << 16)],  # inside the slot
]
MEMORY = np.zeros(1 << 17, np.uint8)


def templates() -> list[bytes]:
    return [BatchEncoder().encode(batch).template for batch in _BATCHES]


def split_template(template: bytes) -> Original:
    size = int.from_bytes(template[:4], "little")

    def joined(parts: Sequence[bytes]) -> bytes:
        return len(parts[0]).to_bytes(4, "little") + parts[0] + parts[1]

    return Original((template[4 : 4 + size], template[4 + size :]), joined)


def worker_setup() -> WorkerSetup:
    """A loader's options."""
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


def hello(name: str, arguments: str = "{}") -> bytes:
    fingerprint = getattr(definitions, name).fingerprint()
    return pack_record(Hello(PROTOCOL, name, arguments, fingerprint, *Hello.versions(), bytes(32)))


def openings() -> list[bytes]:
    catalog = Catalog(2, 1, "0" * 16)
    return [
        pack_opening("loader", 1, 8, worker_setup()),
        pack_opening("loader", 0, 8, worker_setup()._replace(policy=None), catalog=catalog),
    ]


REQUEST = pack_record(PlanRequest(2, 0, 1, 5, True, ""))


def conversations() -> list[Original]:
    """A loader's messages from beginning to end. Without a token its proof is the same for every connection."""
    begun = [(Frame(frames.HELLO), hello("numbers", '{"n": 20}')), (Frame(frames.PROOF), pack_record(Proof(b"")))]
    started = pack(tuple(EpochStart(epoch=1, epoch_set=True)))
    tasks = [(Frame(wire.TASK, 0, task), pack([0, 1 + task, 2])) for task in range(3)]
    again = [(Frame(wire.RESET), wire.pack_reset(wire.RESET, 1, started)[wire.PREFIX_BYTES :])]
    again += [(Frame(wire.TASK, 1, 0), pack([0, 1]))]
    ends = [(Frame(wire.STOP), b"")]
    answer = [(Frame(wire.ASSIGNMENT), wire.pack_assignment(0, 1, pack([(0, 0, 1)]))[wire.PREFIX_BYTES :])]
    made = [_stream(*begun, (Frame(frames.OPENING), each), *tasks, *again, *answer, *ends) for each in openings()]
    made.append(_stream(*begun, (Frame(frames.PLAN), REQUEST)))
    return made


def answers() -> list[Original]:
    """A node's answers to the tasks that `_read_as_loader` gives it."""
    told = [
        (Frame(wire.READY), b""),
        (Frame(wire.STARTED), wire.pack_started(0, b"", [pack(CURSOR)])[wire.PREFIX_BYTES :]),
    ]
    for task, batch in enumerate(_BATCHES):
        encoded = BatchEncoder().encode(batch)
        result = wire.Result(0, task, 0, encoded.nbytes, 0, 8, 0.1, same=False, cursor=0)
        body = wire.pack_result(result, encoded.template)[wire.PREFIX_BYTES :]
        told.append((Frame(wire.RESULT, 0, task, bytes(encoded.nbytes)), body))
    error = MSGPACK.dump_error(KeyError("x"), 1)
    answers = [(wire.BAD_SAMPLES, pack([SKIPPED])), (wire.ERROR, error), (wire.ALL_DROPPED, pack([SKIPPED]))]
    answers.append((wire.EXHAUSTED, pack(CURSOR)))
    failed = [(Frame(kind), wire.pack_answer(kind, 0, 7, 0.1, body)[wire.PREFIX_BYTES :]) for kind, body in answers]
    asks = [(Frame(wire.ASK), wire.pack_ask(0, 1, 2, pack([1]))[wire.PREFIX_BYTES :]), (Frame(frames.PONG), b"")]
    reset = [(Frame(wire.RESET_DONE), wire.pack_reset(wire.RESET_DONE, 1)[wire.PREFIX_BYTES :])]
    died = [(Frame(frames.DIED), pack_record(DeathReport(1, -9, "killed", "", True, False)))]
    return [_stream(*told), _stream(*told[:4], *failed), _stream(*told[:2], *asks, *reset, *died)]
