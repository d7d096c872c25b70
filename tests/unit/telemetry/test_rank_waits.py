"""The comparison of ranks: which starve, in which words; figures on their way between ranks; the window of a rank."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.telemetry.counters import Recorder, Stage
from asyncloader.telemetry.rank_waits import RankWait, WaitWindow, compare, pack, unpack

SHARES = st.floats(0.0, 1.0)
STAGES: list[Stage] = ["sampler", "fetch", "decode", "collate", "transfer", "h2d"]


def wait(share: float, host: str = "a", stage: Stage = "fetch", workers: int = 2) -> RankWait:
    return RankWait(host, 100, share, stage, workers)


WAITS = st.dictionaries(
    st.integers(0, 300),
    st.builds(wait, SHARES, st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(STAGES), st.integers(0, 2)),
    max_size=40,
)


def test_the_sentence_that_users_want() -> None:
    """One host of a fleet waits for its workers' fetches, and the other ranks do not."""
    fleet = {rank: wait(0.38 if rank // 4 == 36 else 0.02, f"node-{rank // 4}") for rank in range(256)}
    text, starving = compare(fleet)
    assert text == ("ranks 144 to 147, one host (node-36), wait 38% of the time for worker fetches; the others 2%")
    assert starving == tuple((rank, "fetch") for rank in range(144, 148))


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ({}, ""),
        ({0: wait(0.9)}, ""),
        ({0: wait(0.01), 1: wait(0.02)}, "all 2 ranks wait alike, 1 to 2% of the time"),
        ({0: wait(0.5), 1: wait(0.6)}, "all 2 ranks wait alike, 50 to 60% of the time, for worker fetches"),
        ({0: wait(0.5), 1: wait(0.6, stage="decode")}, "all 2 ranks wait alike, 50 to 60% of the time"),
        (
            {0: wait(0.5, workers=0), 1: wait(0.0)},
            "rank 0 waits 50% of the time for reads in the training process; the other 0%",
        ),
        (
            {0: wait(0.5, "x", "collate"), 1: wait(0.01, "y"), 2: wait(0.03, "y")},
            "rank 0, on x, waits 50% of the time for collation; the others 1 to 3%",
        ),
        (
            {0: wait(0.4, stage="decode"), 1: wait(0.3, stage="collate"), 2: wait(0.0), 4: wait(0.3, stage="collate")},
            "rank 0 waits 40% of the time for decoding; ranks 1 and 4 wait 30% of the time for collation; the other 0%",
        ),
        (
            {**{rank: wait(0.3, str(rank)) for rank in range(9)}, 9: wait(0.0, "z")},
            "ranks 0 to 8, 9 hosts, wait 30% of the time for worker fetches; the other 0%",
        ),
        ({0: wait(0.01), 1: wait(0.055)}, "all 2 ranks wait alike, 1 to 6% of the time, for worker fetches"),
    ],
)
def test_sentences(waits: dict[int, RankWait], text: str) -> None:
    """Ranks are named by their runs, with reason and hosts; without a clear gap no rank stands out."""
    assert compare(waits).text == text


@given(WAITS)
def test_a_gap_separates_those_that_starve(waits: dict[int, RankWait]) -> None:
    """Each rank that starves waits twice as long as each other rank, and 5 % longer; some rank always does not. If none
    starves, no such gap exists. The text is one bounded line.
    """
    text, starving = compare(waits)
    named = {rank for rank, _ in starving}
    assert all(waits[rank].stage == stage for rank, stage in starving)
    assert bool(text) == (len(waits) > 1)
    assert "\n" not in text
    assert len(text) < 1000
    inside, outside = ([waits[r].share for r in waits if (r in named) == want] for want in (True, False))
    if inside:
        assert min(inside) >= 2 * max(outside)
        assert min(inside) - max(outside) >= 0.05 - 1e-9
    elif len(waits) > 1:
        order = sorted(outside)
        assert not any(after >= 2 * before and after - before >= 0.05 for before, after in pairwise(order))


@given(WAITS)
def test_figures_survive_their_way(waits: dict[int, RankWait]) -> None:
    """Packed and unpacked, they are the same to four digits."""
    for each in waits.values():
        found = unpack(pack(each).encode())
        assert found is not None
        assert found._replace(share=each.share) == each
        assert found.share == pytest.approx(each.share, abs=1e-4)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_other_bytes_are_left_out(data: bytes) -> None:
    """Bytes that no rank has packed give no figures and raise nothing."""
    assert unpack(data) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"host": "a\nWARNING b"},
        {"host": "a" * 65},
        {"share": 1.5},
        {"share": float("nan")},
        {"stage": "rm -rf"},
        {"batches": "many"},
        {"workers": None},
    ],
)
def test_impossible_figures_are_left_out(broken: dict[str, Any]) -> None:
    """A value out of its range, or a host that would break a log line, makes the figures invalid."""
    good: list[Any] = list(wait(0.5))
    names = list(RankWait._fields)
    for name, value in broken.items():
        good[names.index(name)] = value
    assert unpack(json.dumps(good).encode()) is None
    assert unpack(pack(wait(0.5)).encode()) is not None


def block(**seconds: list[float]) -> Any:
    recorder = Recorder()
    for stage, times in seconds.items():
        for each in times:
            recorder.time(stage, each)  # type: ignore[arg-type]
    return np.array(recorder.block)


def test_a_window_forgets_what_was_long_ago() -> None:
    """Too few batches give nothing; later the figures are those of the last 15 to 30 seconds, and name the stage that
    was busiest in them.
    """
    window = WaitWindow()
    assert window.measure("h", 10.0, 9.0, 7, {-1: block(wait=[1.0] * 7)}) is None
    assert window.measure("h", 0.4, 0.1, 80, {-1: block(wait=[0.01] * 8)}) is None
    first: dict[str, list[float]] = {"fetch": [1.0] * 20}
    waits = [0.9] * 20
    found = window.measure("h", 20.0, 18.0, 20, {-1: block(wait=waits), 0: block(**first), 1: block(fetch=[0.1])})
    assert found is not None
    assert (found.share, found.stage, found.batches, found.host) == (0.9, "fetch", 20, "h")
    assert found.workers == 2
    later = {-1: block(wait=waits, sampler=[0.2] * 80), 0: block(**first, collate=[0.1] * 80)}
    window.measure("h", 40.0, 18.0, 100, later)
    last = {-1: block(wait=waits, sampler=[0.2] * 160), 0: block(**first, collate=[0.1] * 160)}
    found = window.measure("h", 60.0, 19.0, 180, last)
    assert found is not None
    assert found.share == pytest.approx(1 / 40)
    assert (found.stage, found.batches) == ("sampler", 180)


def test_a_window_waits_for_slow_batches() -> None:
    """Where a batch takes longer than the window, it grows until it has eight."""
    window = WaitWindow()
    shares = []
    for step in range(1, 40):
        found = window.measure("h", 20.0 * step, 10.0 * step, step, {-1: block(wait=[10.0] * step)})
        shares.append(None if found is None else (found.share, found.batches >= 8))
    assert shares[:7] == [None] * 7
    assert set(shares[7:]) == {(0.5, True)}


@pytest.mark.parametrize(
    ("main", "worker", "stage"),
    [
        ({}, {"fetch": [0.2], "decode": [0.3], "collate": [0.1]}, "decode"),
        ({"sampler": [0.5]}, {"fetch": [0.2]}, "sampler"),
        ({"transfer": [0.2, 0.2], "wait": [0.1]}, {"fetch": [0.3]}, "transfer"),
        ({"transfer": [0.0005] * 1000}, {"fetch": [0.3]}, "fetch"),  # many at a time, each of them at once
        ({"h2d": [0.5]}, {"fetch": [0.2]}, "h2d"),
        ({"snapshot": [0.5]}, {"fetch": [0.2]}, "snapshot"),
        ({"fetch": [0.2], "collate": [0.4]}, None, "collate"),
    ],
)
def test_the_busiest_stage_is_the_reason(
    main: dict[str, list[float]], worker: dict[str, list[float]] | None, stage: str
) -> None:
    """Of the stages that run side by side, that which was busy for the largest part of the time; without workers, of
    those of this process.
    """
    blocks = {-1: block(**main)} | ({} if worker is None else {0: block(**worker)})
    found = WaitWindow().measure("h", 1.0, 0.5, 8, blocks)
    assert found is not None
    assert found.stage == stage
