"""Simulated epochs whose rates are known without a simulation, and the requests that they send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.prefetch import MAX_PREFETCHED_RANGES
from asyncloader.remote.shard_splitting import RANGES_PER_WORKER, cut, group_ranges
from asyncloader.simulation import epoch_simulation
from asyncloader.simulation.contents import Contents
from asyncloader.simulation.epoch_simulation import RunSetting, Simulated, WorkerCosts, simulate
from asyncloader.simulation.forecast import Forecast
from asyncloader.simulation.parquet_layout import GroupReads, ParquetLayout
from asyncloader.telemetry.prediction import BATCH_COST_S, CROWDED

TAR, LINES = ShardFormat("tar", None), ShardFormat("jsonl", None)
MIB = 1 << 20
FREE = WorkerCosts()
PLAIN = RunSetting(workers=2, batch_size=32, rtt_s=0.0, cpus=8.0)


def shards(number: int, size: int, samples: int, format: ShardFormat = TAR) -> Contents:
    catalog = [Shard(f"http://a/{at}", format, size) for at in range(number)]
    return Contents(catalog, np.full(number, size), np.full(number, samples))


def run(contents: Contents, setting: RunSetting, costs: WorkerCosts = FREE) -> Simulated:
    ranges = cut(contents.catalog, RANGES_PER_WORKER * setting.workers)
    return simulate(contents, group_ranges(ranges, contents.catalog, setting.workers), setting, costs)


def test_known_rates() -> None:
    """A run that one part alone limits is as fast as that part: the network, decoding, requests, the CPUs, the step."""
    large = shards(256, 4 * MIB, 64)  # samples of 64 KiB
    assert run(large, replace(PLAIN, rtt_s=0.02, bandwidth=1e8)).rate == pytest.approx(1e8 / 65536, rel=0.03)
    decoding = WorkerCosts(decoding=2e-3)
    assert run(large, PLAIN, decoding).rate == pytest.approx(2 / 2e-3, rel=0.03)
    assert run(large, replace(PLAIN, cpus=1.5), decoding).rate == pytest.approx(1.5 / 2e-3 / CROWDED, rel=0.03)
    assert run(large, replace(PLAIN, step_s=0.05, rtt_s=0.05), decoding).rate == pytest.approx(32 / 0.05, rel=0.03)
    of_shard = 2e-3 + 2 * BATCH_COST_S * 2 / 3  # a request, and the worker's part of two batches
    assert run(large, PLAIN, WorkerCosts(requesting=2e-3)).rate == pytest.approx(2 * 64 / of_shard, rel=0.03)
    # Decompression runs in threads beside the loop: only the CPUs limit it.
    packed = WorkerCosts(parsing=4e-3 / 65536, packed=True)
    assert run(large, PLAIN, packed).rate > 1.5 * run(large, PLAIN, replace(packed, packed=False)).rate


def test_latency_is_hidden_as_far_as_ranges_are_opened_early() -> None:
    """Each worker has the current shard and those opened after it in flight: so many come in a round trip."""
    rate = run(shards(4000, 1024, 1), replace(PLAIN, rtt_s=0.1, batch_size=1, prefetch_factor=64)).rate
    assert rate == pytest.approx(2 * (1 + MAX_PREFETCHED_RANGES) / 0.1, rel=0.1)


def layout(*groups: GroupReads) -> ParquetLayout:
    return ParquetLayout((0, 65536), tuple(range(0, 1000 * len(groups) + 1, 1000)), groups)


GROUP = GroupReads((MIB, 512), ((3 * MIB, MIB), (0, 1)), whole=False)
CASES = {
    "tar": shards(40, 100_000, 50),
    "lines": shards(2, 9_999_999, 5000, LINES),
    "empty": shards(30, 0, 0),
    "parquet": replace(shards(6, 30 * MIB, 3000, PARQUET), layouts={0: layout(*[GROUP] * 3)}),
    "mixed": Contents(
        [Shard("http://a/1", TAR, None), Shard("http://a/2", PARQUET, 9)],
        np.array([77_777, 30 * MIB]),
        np.array([900, 3000]),
        {1: layout(GROUP, GROUP._replace(whole=True, later=()), GROUP)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_requests_of_a_whole_epoch(case: str) -> None:
    """The loader's own code, on the simulated store, sends exactly the requests that `Contents.reads` counts; of two
    workers, one may read again what the other could not fill a batch with.
    """
    contents = CASES[case]
    for workers in (1, 2):
        ranges = cut(contents.catalog, RANGES_PER_WORKER * workers)
        assert len(ranges) == (4 * workers if case == "lines" else len(contents.catalog))
        done, reads = run(contents, replace(PLAIN, workers=workers, rtt_s=0.01, bandwidth=1e9)), contents.reads(ranges)
        assert done.whole
        if workers == 1:
            assert (done.requests, done.nbytes) == reads
        assert reads.requests <= done.requests <= reads.requests + 8
        assert (done.rate > 0) == (contents.total > 0)
        assert sum(contents.units(each, 7) for each in ranges) == sum(-(-int(each) // 7) for each in contents.samples)


def test_simulations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an index that claims any number of samples, nor a million shards, empty ones too, make it endless."""
    monkeypatch.setattr(epoch_simulation, "MOST_REQUESTS", 500)
    for contents in (shards(1000, 100, 1 << 40), shards(50_000, 0, 0), shards(3, 1 << 43, 1 << 10)):
        done = run(contents, replace(PLAIN, rtt_s=0.01, bandwidth=1e9))
        assert not done.whole
        assert done.requests <= 1000
        assert np.isfinite(done.seconds)


def test_limits_and_helps_are_simulations() -> None:
    """What limits a run is what makes it faster when it is taken away; only settings that gain are proposed."""
    large = shards(256, 4 * MIB, 64)
    cases = {
        "network": (replace(PLAIN, bandwidth=1e8, rtt_s=0.05), FREE),
        "decode": (PLAIN, WorkerCosts(decoding=2e-3)),
        "latency": (replace(PLAIN, rtt_s=0.2), FREE),
        "training step": (replace(PLAIN, step_s=0.1), WorkerCosts(decoding=1e-3)),
    }
    for name, (setting, costs) in cases.items():
        plan = group_ranges(cut(large.catalog, 8), large.catalog, 2)
        forecast = Forecast(large, plan, setting, costs)
        first, second = forecast.limits()[:2]
        assert first.name == name
        assert first.gain > max(1.3, second.gain)
        helps = {each.option: each.gain for each in forecast.helps()}
        assert all(gain >= 1.1 for gain in helps.values())
        assert any(option.startswith("num_workers=") for option in helps) == (name in ("decode", "latency"))
