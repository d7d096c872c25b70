"""The benchmark's own machinery: its workloads, loops, checks, arithmetic and page. No speed is asserted."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import days, harness, report
from .__main__ import parse, save
from .child import check_positions
from .harness import JobFailed, Results, tree_memory
from .loaders import Pass, build, drive
from .plan import (
    ASYNC,
    ASYNC_PLAIN,
    FACADE,
    FLOORS,
    LIMITS,
    METRICS,
    OURS,
    PEERS,
    ROWS,
    TORCH,
    TORCH_FILE_SYSTEM,
    TORCH_UNORDERED,
    Job,
    jobs,
)
from .workloads import WORKLOADS, Checksum, ContentError, reference_checksum

BATCHES = 5


def collect(loader: str, name: str, workers: int) -> list[Any]:
    """Two epochs of `loader`, every batch cloned; what each pass saw is checked as in a measurement."""
    workload = WORKLOADS[name]
    consumer = next(iter(workload.consumers.values()))
    kept: list[Any] = []

    def clone(batch: Any) -> float:
        kept.append({key: leaf.clone() for key, leaf in batch.items()} if isinstance(batch, dict) else batch.clone())
        return consumer.consume(batch)

    def schedule() -> Iterator[Pass]:
        for _ in range(2):
            first = len(kept)
            epoch = Pass(clone)
            yield epoch
            positions = [workload.positions(batch) for batch in kept[first:]]
            consumer.check(epoch.results, check_positions(workload, positions, BATCHES, loader))
            assert epoch.started < epoch.first < epoch.ended

    drive(loader, lambda: build(loader, workload, BATCHES, workers=workers), schedule())
    return kept


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("loader", [*OURS, ASYNC_PLAIN])
def test_content_equals_torch(loader: str, name: str, workers: int) -> None:
    """Our loaders deliver torch's batches, leaf by leaf, and an epoch has the checksum of its definition."""
    ours, theirs = collect(loader, name, workers), collect(TORCH, name, workers)
    assert len(ours) == len(theirs) == 2 * BATCHES
    checksum = Checksum()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    for batch in ours[:BATCHES]:
        checksum.add(batch)
    assert str(checksum) == reference_checksum(name, BATCHES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_consumers_tell_batches_apart(name: str) -> None:
    """A batch missing, repeated or in another's place is found by every consumer of the timed epochs."""
    workload = WORKLOADS[name]
    batches = list(build(TORCH, workload, BATCHES, workers=0))
    positions = [workload.positions(batch) for batch in batches]
    for consumer in workload.consumers.values():
        results = [consumer.consume(batch) for batch in batches]
        consumer.check(results, positions)
        for wrong in (results[1:], [results[0], *results[:-1]], [results[1], results[0], *results[2:]]):
            with pytest.raises(ContentError):
                consumer.check(wrong, positions)
    with pytest.raises(ContentError, match="out of order"):
        check_positions(workload, [positions[1], positions[0], *positions[2:]], BATCHES, TORCH)


def test_checksum_finds_one_wrong_element() -> None:
    """One changed element, another order or another dtype changes the checksum."""
    (batch,) = build(TORCH, WORKLOADS["ints"], 1, workers=0)
    changed = batch.clone()
    changed[7] += 1
    sums: list[str] = []
    for each in (batch, batch.flip(0), changed, batch.int()):
        checksum = Checksum()
        checksum.add(each)
        sums.append(str(checksum))
    assert sums[0] == reference_checksum("ints", 1)
    assert len(set(sums)) == len(sums)


def fake_results(factor: float) -> Results:
    """Every metric measured twice: torch 100, ours `factor` times that, and on asyncio's loop as many times ours."""
    results = Results(memcpy=[1e10])
    for metric in METRICS:
        for loader in (TORCH_FILE_SYSTEM, TORCH_UNORDERED, TORCH, *OURS):
            for noise in (1.0, 1.2):
                results.add(metric.key, loader, 100.0 * noise * (factor if loader in OURS else 1.0))
        for noise in (1.0, 1.2):
            results.add(metric.key, ASYNC_PLAIN, 100.0 * noise * factor**2)
    return results


def test_floors_bound_from_the_right_side() -> None:
    """200 times torch holds the floors of rates and misses those of costs; a 200th the reverse."""
    rates = {metric.key for metric in METRICS if metric.more_is_better}
    for factor, held in ((200.0, True), (0.005, False)):
        verdicts = report.verdicts(fake_results(factor))
        assert len(verdicts) == len(FLOORS)
        for verdict in verdicts:
            assert verdict.ratio == pytest.approx(factor)
            if verdict.floor.bound is not None:
                assert verdict.ok is ((verdict.metric.key in rates) is held)


def test_limits_bound_the_measured_number() -> None:
    """A figure in its metric's unit is held against its limit, for each of our loaders."""
    assert len(report.limit_verdicts(fake_results(1.0))) == 2 * len(LIMITS)
    results = Results()
    results.add("seeded/state", ASYNC, 49e-6)
    results.add("seeded/state", FACADE, 51e-6)
    assert [(each.loader, each.ok) for each in report.limit_verdicts(results)] == [(ASYNC, True), (FACADE, False)]
    assert "| **short** |" in report.limit_table(results)


def test_page(tmp_path: Path) -> None:
    """The page has a line for each floor and says which are short."""
    results = fake_results(20.0)
    save(
        results,
        ["2026-01-01", "2026-01-02"],
        "python -m tests.benchmarks",
        "## Memory",
        tmp_path / "benchmarks.md",
    )
    text = (tmp_path / "benchmarks.md").read_text()
    assert "## Memory\n\n## " in text
    assert "Medians of 1 interleaved rounds, measured on 2026-01-01 and 2026-01-02;" in text
    bound = [verdict.ok for verdict in report.verdicts(results) if verdict.floor.bound is not None]
    bound += [verdict.ok for verdict in report.limit_verdicts(results)]
    assert text.count("| ok |") == sum(bound) > 0
    assert text.count("| **short** |") == len(bound) - sum(bound) > 0


def test_the_page_has_the_rounds_of_two_days(tmp_path: Path) -> None:
    """A second measurement of a day replaces the first, a third day the oldest, and one of other rows all days before.
    Other parts of the file stay.
    """
    file = tmp_path / "benchmarks.json"

    def add(part: str, day: str, *rates: float, loader: str = TORCH) -> tuple[list[float], list[str]]:
        results = Results(memcpy=list(rates), checksums={("ints", TORCH): "00"})
        for rate in rates:
            results.add("ints/touch", loader, rate)
        merged, dates = days.add(file, part, day, results)
        assert merged.memcpy == merged.values["ints/touch", loader]
        assert merged.checksums == results.checksums
        return merged.memcpy, dates

    assert add("a", "2026-01-01", 1.0, 2.0) == ([1.0, 2.0], ["2026-01-01"])
    assert add("a", "2026-01-01", 3.0) == ([3.0], ["2026-01-01"])
    assert add("b", "2026-01-01", 4.0) == ([4.0], ["2026-01-01"])
    assert add("a", "2026-01-03", 5.0, 6.0) == ([3.0, 5.0, 6.0], ["2026-01-01", "2026-01-03"])
    assert add("a", "2026-01-04", 7.0) == ([5.0, 6.0, 7.0], ["2026-01-03", "2026-01-04"])
    assert add("a", "2026-01-05", 8.0, loader=ASYNC) == ([8.0], ["2026-01-05"])
    assert add("b", "2026-01-04", 9.0) == ([4.0, 9.0], ["2026-01-01", "2026-01-04"])


def test_rows_select_jobs() -> None:
    """Every row feeds on at least one job, peers add jobs, and an unknown row is refused."""
    for row in ROWS:
        measured = {job.loader.partition(",")[0] for job in jobs((row,), 1.0, peers=False, full=False)}
        assert measured >= (set(OURS) if row == "seeded" else {TORCH})
    assert len(jobs(ROWS, 1.0, peers=True, full=False)) > len(jobs(ROWS, 1.0, peers=False, full=False))
    with pytest.raises(SystemExit):
        parse(["--rows", "nonsense"])


def test_memory_of_the_tree_counts_children() -> None:
    """The memory of a tree has the children's private pages in it."""
    context = torch.multiprocessing.get_context("fork")
    parent, child = context.Pipe()
    process = context.Process(target=_hold, args=(child,))
    before = tree_memory(os.getpid())
    process.start()
    parent.recv()
    during = tree_memory(os.getpid())
    parent.send(None)
    process.join()
    assert during.pss > before.pss + 48 * 2**20  # of 64: this process may free some in between


def test_memory_counts_open_segments_once() -> None:
    """A segment that is open but not mapped is counted beside PSS; a mapped one only in PSS."""
    before = tree_memory(os.getpid())
    with os.fdopen(os.memfd_create("segment"), "r+b") as segment:
        os.posix_fallocate(segment.fileno(), 0, 2**24)
        assert tree_memory(os.getpid()).unmapped == before.unmapped + 2**24
        with mmap.mmap(segment.fileno(), 2**24):
            assert tree_memory(os.getpid()).unmapped == before.unmapped
    assert tree_memory(os.getpid()).unmapped == before.unmapped


def _hold(pipe: Any) -> None:
    held = bytearray(b"1") * 2**26  # 64 MiB, every page written
    pipe.send(len(held))
    pipe.recv()


@pytest.mark.parametrize("loader", [PEERS[0], TORCH, *OURS, ASYNC_PLAIN])
def test_only_a_peers_failure_is_forgiven_and_told(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that fails is measured again and named on the page; torch or we fail once and there is no table."""
    outputs: list[Any] = [JobFailed("a b\nContentError: wrong"), ({"rate": {"touch": 2.0}, "cpu": {"touch": 1.0}}, [])]
    outputs[1][0]["checksum"] = ""
    results = iter([*outputs, ({"rate": 1.0}, [])])  # the last limit is memcpy's

    def run_job(_: Job) -> Any:
        output = next(results)
        if isinstance(output, JobFailed):
            raise output
        return output

    monkeypatch.setattr(harness, "run_job", run_job)
    jobs = [Job("throughput", "ints", loader)]
    if loader not in PEERS:
        with pytest.raises(JobFailed):
            harness.run_rounds(lambda _: jobs, 1, lambda _: None)
        return
    measured = harness.run_rounds(lambda _: jobs, 1, lambda _: None)
    assert measured.median("ints/touch", loader) == 2.0
    assert f"- {loader}, ints: ContentError: wrong" in report.failures(measured)[0]
