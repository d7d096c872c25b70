from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.workers.ipc import wire

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
i32 = st.integers(-(1 << 31), (1 << 31) - 1)
seconds = st.floats(0.0, 1e12, exclude_max=True)
payloads = st.binary(max_size=60)
frames = st.lists(st.tuples(st.integers(0, 255), payloads), max_size=12)

results = st.builds(
    wire.Result,
    epoch=u32,
    seq=u64,
    slot=i32,
    nbytes=u64,
    pickled=u64,
    samples=u32,
    busy=seconds,
    same=st.booleans(),
    sent=seconds,
)


def body_of(frame: bytes) -> bytes:
    ((_, body),) = wire.FrameSplitter().feed(frame)
    return body


@given(results, payloads, payloads)
def test_result_round_trip(result: wire.Result, template: bytes, cursor: bytes) -> None:
    """Every field survives, over its whole range, with the template and the cursor."""
    result = result._replace(cursor=len(cursor))
    assert wire.unpack_result(body_of(wire.pack_result(result, template, cursor))) == (
        result,
        b"" if result.same else template,
        cursor,
    )


@given(u32, u64, i32, u32, st.floats(allow_nan=False), payloads)
def test_task_round_trip(epoch: int, seq: int, slot: int, ring: int, sent: float, index: bytes) -> None:
    """Every field survives, over its whole range."""
    body = body_of(wire.pack_task(epoch, seq, slot, ring & 0x7FFFFFFF, sent, index))
    assert wire.unpack_task(body) == (epoch, seq, slot, ring & 0x7FFFFFFF, sent, index)


@given(frames, st.lists(st.integers(1, 40), max_size=40))
def test_frames_survive_any_cuts(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    """However the stream is cut into reads, the same frames are returned in the same order."""
    stream = b"".join(wire.pack(kind, payload) for kind, payload in sent)
    splitter, start = wire.FrameSplitter(), 0
    got: list[tuple[int, bytes]] = []
    for size in [*cuts, len(stream)]:
        got += splitter.feed(stream[start : start + size])
        start += size
    assert got == sent
    assert splitter.pending == 0


@given(frames, st.integers(0, 30))
def test_a_truncated_stream_gives_its_whole_frames(sent: list[tuple[int, bytes]], missing: int) -> None:
    """All frames that are whole are returned in order; the rest of the bytes stays pending."""
    stream = b"".join(wire.pack(kind, payload) for kind, payload in sent)
    part = stream[: max(0, len(stream) - missing)]
    splitter = wire.FrameSplitter()
    got = list(splitter.feed(part))
    ends = list(accumulate(5 + len(payload) for _, payload in sent))
    whole = sum(end <= len(part) for end in ends)
    assert got == sent[:whole]
    assert splitter.pending == len(part) - (ends[whole - 1] if whole else 0)
