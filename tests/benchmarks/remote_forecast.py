"""Compares predictions of runs over the store with the runs: `python -m tests.benchmarks.remote_forecast`.

The prediction is that of `asyncloader plan` for the shards at the store's address. It knows nothing of the store, which
shares the CPUs with the loader: so the CPU time that the store needs for a sample is measured before, that of the
measurement's check during the run, and both are taken from the CPUs that the loader has.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import statistics
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

import psutil

from asyncloader.bridge import run_in_thread
from asyncloader.cpus import cpu_limit
from asyncloader.remote.reading import READ_AHEAD
from asyncloader.simulation.busy_cpus import busy_cpus
from asyncloader.simulation.epoch_simulation import RunSetting, simulate
from asyncloader.simulation.shard_facts import gather_facts
from asyncloader.transports import HttpTransport

from . import days
from .harness import Results, run_job
from .plan import Job
from .remote import PAGE, ROUNDS, save
from .remote_content import SHARDS, tar_size
from .remote_loaders import busy_member, shard_urls
from .remote_plan import BATCH, OURS_TAR, WORKERS
from .remote_store import running_store

MODULE = "tests.benchmarks.remote_forecast"
TITLE = "## Predictions of runs over the store"
WITHIN = 0.15
"""The largest difference from the measured rate that is wanted."""

LONGER = 4
"""Times as long is a run measured over a network of low bandwidth: its batches come in waves, while several shards fill
their buffers and when they are read from these.
"""

_BARE_SHARDS = 64
_ROUNDS = 8  # in which the CPUs that the store takes, and the rate, approach each other


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        kind: the folder of tar files.
        latency: milliseconds.
        bandwidth: megabytes per second; 0: unlimited.
        decode_s: CPU seconds of decoding a sample.
        step_s: seconds of a step.
    """

    kind: str
    latency: int
    bandwidth: int = 0
    decode_s: float = 0.0
    step_s: float = 0.0

    @property
    def title(self) -> str:
        """Its name in the table."""
        parts = [f"samples of {SHARDS[self.kind].size >> 10} KiB, {self.latency} ms"]
        parts += [f"{self.bandwidth} MB/s"] if self.bandwidth else []
        parts += [f"decoding takes {self.decode_s * 1e3:g} ms"] if self.decode_s else []
        parts += [f"a step takes {self.step_s * 1e3:g} ms"] if self.step_s else []
        return ", ".join(parts)

    @property
    def key(self) -> str:
        """Key of its rates in the results."""
        return f"forecast/{self.title}"

    def address(self, store: str) -> str:
        """The store's URL with latency and bandwidth."""
        return f"{store}/{self.latency}" + (f"x{self.bandwidth}" if self.bandwidth else "")

    def job(self, store: str, seconds: float) -> Job:
        """The job that measures it."""
        return Job(
            "remote",
            self.kind,
            OURS_TAR,
            seconds=seconds * (LONGER if self.bandwidth else 1),
            store=self.address(store),
            step=self.step_s,
            decode=self.decode_s,
        )


CASES = (
    Case("large", 20),
    Case("large", 50),
    Case("large", 150),
    Case("small", 20),
    Case("small", 50),
    Case("large", 50, bandwidth=100),
    Case("small", 20, bandwidth=20),
    Case("large", 50, decode_s=2e-3),
    Case("small", 20, decode_s=5e-4),
    Case("large", 50, step_s=0.02),
)


def predict(case: Case, store: str, others_s: float) -> float:
    """Predict the samples per second.

    Args:
        case: the run.
        store: URL of the store.
        others_s: CPU seconds that the store, and the check of what comes, need for a sample.
    """
    shards = SHARDS[case.kind]
    facts = run_in_thread(
        gather_facts(
            shard_urls(case.address(store), case.kind, shards.objects),
            None,
            workers=WORKERS,
            batch_size=BATCH,
            read_ahead=READ_AHEAD,
            read=True,
            ping=False,
            decode=lambda sample: busy_member(0.0, sample),
        )
    )
    assert facts.measured is not None
    costs = replace(facts.measured.costs, decoding=facts.measured.costs.decoding + case.decode_s)
    cpus, rate = cpu_limit(), 0.0
    for _ in range(_ROUNDS):
        left = max(0.1, cpus - rate * others_s)
        setting = RunSetting(
            WORKERS,
            BATCH,
            rtt_s=case.latency / 1e3,
            bandwidth=case.bandwidth * 1e6 or None,
            step_s=case.step_s,
            cpus=left,
            requests=facts.requests,
        )
        found = simulate(facts.contents, facts.assignments, setting, costs).rate
        rate = (rate + found) / 2 if rate else found
    return rate


def store_cost(store: str, kind: str) -> float:
    """Measure the CPU seconds that the store needs for a sample of these files."""
    (process,) = [each for each in psutil.Process().children() if "tests.benchmarks.remote_store" in each.cmdline()]

    async def read() -> int:
        async with HttpTransport(f"{store}/1/{kind}") as transport:
            waiting = iter(range(_BARE_SHARDS))
            return sum(await asyncio.gather(*(_drain(transport, waiting) for _ in range(4))))

    run_in_thread(read())
    before = process.cpu_times()
    nbytes = run_in_thread(read())
    after = process.cpu_times()
    return (
        (after.user + after.system - before.user - before.system) / nbytes * tar_size(SHARDS[kind]) / SHARDS[kind].each
    )


async def _drain(transport: HttpTransport, waiting: Iterator[int]) -> int:
    nbytes = 0
    for number in waiting:
        async with aclosing(transport.stream(f"{number:04}.tar")) as chunks:
            async for chunk in chunks:
                nbytes += len(chunk)
    return nbytes


def measure(cases: tuple[Case, ...], rounds: int, seconds: float) -> Results:
    """Predict and measure each case, in each round."""
    results = Results()
    with running_store() as store:
        for _ in range(rounds):
            with busy_cpus(WORKERS - 1):
                of_store = {kind: store_cost(store, kind) for kind in SHARDS}
            for case in cases:
                output, _ = run_job(case.job(store, seconds))
                results.add(case.key, "predicted", predict(case, store, of_store[case.kind] + output["check"]))
                results.add(case.key, "measured", output["rate"])
                ratio = results.ratio(case.key, "predicted", "measured")[0]
                print(f"{case.title}: {output['rate']:,.0f} samples/s, predicted x {ratio:.2f}", file=sys.stderr)
    return results


def table(results: Results, cases: tuple[Case, ...] = CASES) -> str:
    """The comparison in Markdown."""
    lines = ["| run | measured, samples/s | predicted | ratio | |", "|---|--:|--:|--:|---|"]
    for case in cases:
        if not results.has(case.key, "measured"):
            continue
        measured, predicted = (results.median(case.key, each) for each in ("measured", "predicted"))
        said = "ok" if abs(predicted / measured - 1) <= WITHIN else "**off**"
        lines.append(f"| {case.title} | {measured:,.0f} | {predicted:,.0f} | **{predicted / measured:.2f}** | {said} |")
    return "\n".join(lines)


def section(results: Results, dates: list[str], command: str) -> str:
    """The section of the page."""
    rounds = max(map(len, results.values.values()))
    return "\n\n".join(
        [
            TITLE,
            (
                f"What [`asyncloader plan`](commands.md#plan) predicts, beside what {WORKERS} workers with batches of "
                f"{BATCH} read from tar shards. Written by `{command}`: medians of {rounds} rounds, measured on "
                f"{' and '.join(dates)}. A difference of at most {WITHIN:.0%} is wanted. The store shares the CPUs: "
                "the CPU time that it needs for a sample is measured before, that of the check during the run, and "
                "both are taken from the prediction's CPUs."
            ),
            table(results),
        ]
    )


def main(arguments: list[str]) -> int:
    """Run the comparison; the exit code: 1 if a prediction is off."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Compare predictions with runs.")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement (%(default)s)")
    parser.add_argument("--save", action="store_true", help=f"write the section of {PAGE.name}")
    options = parser.parse_args(arguments)
    results = measure(CASES, options.rounds, options.seconds)
    print(table(results), flush=True)
    if options.save:
        today = dt.datetime.now(dt.UTC).date().isoformat()
        kept = days.add(ROUNDS, "forecast", today, results)
        save(section(*kept, " ".join([f"python -m {MODULE}", *arguments])))
    ratios = [results.median(case.key, "predicted") / results.median(case.key, "measured") for case in CASES]
    print(f"median ratio {statistics.median(ratios):.2f}", file=sys.stderr)
    return int(any(abs(ratio - 1) > WITHIN for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
