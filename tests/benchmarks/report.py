"""From results to the table on the terminal and the page in the docs: both are the same Markdown."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

from .harness import Results
from .plan import (
    ASYNC,
    ASYNC_PLAIN,
    FACADE,
    FLOORS,
    LIMITS,
    METRICS,
    OURS,
    PEER_PACKAGES,
    PEERS,
    TORCH,
    TORCH_FILE_SYSTEM,
    TORCH_UNORDERED,
    Floor,
    Limit,
    Metric,
)

LARGE_BYTES = 64 * 3 * 224 * 224 * 4
PACKAGES = ("torch", "numpy", "uvloop", "aiohttp")
COMPARED = ("large/touch", "large/sum", "small/touch", "ints/touch")
"""The metrics in which the peers are measured too."""
SHORT_TITLES = {
    "large/touch": "large, touched",
    "large/sum": "large, summed",
    "small/touch": "dicts",
    "ints/touch": "ints",
}


@dataclass(frozen=True)
class Verdict:
    """A floor and its measurement."""

    floor: Floor
    metric: Metric
    ratio: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        """Whether the ratio of the medians holds the floor."""
        bound = self.floor.bound
        if bound is None:
            return True
        return self.ratio >= bound if self.metric.more_is_better else self.ratio <= bound


def verdicts(results: Results) -> list[Verdict]:
    """Every floor whose two sides were measured, in the order of the metrics."""
    found: list[Verdict] = []
    for metric in METRICS:
        for floor in FLOORS:
            if floor.metric == metric.key and results.has(metric.key, floor.loader):
                ratio, low, high = results.ratio(metric.key, floor.loader, floor.baseline)
                found.append(Verdict(floor, metric, ratio, low, high))
    return found


def floor_table(results: Results) -> str:
    """The Markdown table of the floors."""
    lines = [
        "| what | torch | loader | measured | ratio | rounds | floor | |",
        "|---|--:|---|--:|--:|--:|--:|---|",
    ]
    for verdict in verdicts(results):
        metric, floor = verdict.metric, verdict.floor
        against = AGAINST.get(floor.baseline, "")
        sign = "at least" if metric.more_is_better else "at most"
        cells = (
            metric.title + against,
            _number(results.median(metric.key, floor.baseline) * metric.scale),
            f"`{floor.loader}`",
            f"{_number(results.median(metric.key, floor.loader) * metric.scale)} {metric.unit}",
            f"**{verdict.ratio:.2f}**",
            f"{verdict.low:.2f} to {verdict.high:.2f}",
            "" if floor.bound is None else f"{sign} {floor.bound:g}",
            "" if floor.bound is None else "ok" if verdict.ok else "**short**",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


AGAINST = {
    TORCH_FILE_SYSTEM: " (torch's `file_system` strategy)",
    TORCH_UNORDERED: " (torch's out of order)",
    ASYNC: f" (against `{ASYNC}` on uvloop)",
}


@dataclass(frozen=True)
class LimitVerdict:
    """A limit, the measurement of one of our loaders, and the range of single rounds, all in the metric's unit."""

    limit: Limit
    metric: Metric
    loader: str
    value: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        """Whether the median is within the limit."""
        return self.value <= self.limit.bound


def limit_verdicts(results: Results) -> list[LimitVerdict]:
    """Every limit that was measured."""
    metrics = {metric.key: metric for metric in METRICS}
    found: list[LimitVerdict] = []
    for limit in LIMITS:
        metric = metrics[limit.metric]
        for loader in OURS:
            if results.has(limit.metric, loader):
                rounds = [value * metric.scale for value in results.values[limit.metric, loader]]
                value = results.median(limit.metric, loader) * metric.scale
                found.append(LimitVerdict(limit, metric, loader, value, min(rounds), max(rounds)))
    return found


def limit_table(results: Results) -> str:
    """The Markdown table of the limits; empty if none was measured."""
    verdicts = limit_verdicts(results)
    if not verdicts:
        return ""
    lines = ["| what | loader | measured | rounds | limit | |", "|---|---|--:|--:|--:|---|"]
    for each in verdicts:
        unit = each.metric.unit
        measured = f"{_number(each.value)} {unit}"
        rounds = f"{_number(each.low)} to {_number(each.high)}"
        said = "ok" if each.ok else "**short**"
        bound = f"at most {each.limit.bound:g} {unit}"
        lines.append(f"| {each.metric.title} | `{each.loader}` | {measured} | {rounds} | {bound} | {said} |")
    return "\n".join(lines)


def peer_table(results: Results) -> str:
    """The Markdown table of every loader's batches per second, and its ratio to torch; empty without rates."""
    metrics = [key for key in COMPARED if results.has(key, TORCH)]
    if not metrics:
        return ""
    lines = [
        "| loader | " + " | ".join(SHORT_TITLES[key] for key in metrics) + " |",
        "|---|" + "--:|" * len(metrics),
    ]
    for loader in (TORCH, TORCH_FILE_SYSTEM, *OURS, ASYNC_PLAIN, *PEERS):
        cells = [f"`{loader}`" if loader in OURS else loader]
        for key in metrics:
            if results.has(key, loader):
                ratio, low, high = results.ratio(key, loader, TORCH)
                cells.append(f"{_number(results.median(key, loader))} ({ratio:.2f} x, {low:.2f} to {high:.2f})")
            else:
                cells.append("")
        if any(cells[1:]):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_bandwidth(results: Results) -> str:
    """The machine's memcpy rate, and the share of it that the large batches reach."""
    copy = statistics.median(results.memcpy)
    text = f"memcpy of one large batch (38.5 MB, warm, one thread): {copy / 1e9:.1f} GB/s."
    for loader in OURS:
        if results.has("large/touch", loader):
            moved = results.median("large/touch", loader) * LARGE_BYTES
            text += f"\n`{loader}` delivers {moved / 1e9:.1f} GB/s of large batches: {moved / copy:.0%} of it."
    if results.has("large/touch", TORCH):
        moved = results.median("large/touch", TORCH) * LARGE_BYTES
        text += f"\ntorch delivers {moved / 1e9:.1f} GB/s: {moved / copy:.0%} of it."
    return text


def machine() -> dict[str, str]:
    """The machine and the versions, for the page."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": f"{model}, {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
    }
    for package in (*PACKAGES, *PEER_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # only without the peers
            found[package] = "not installed"
    return found


def failures(results: Results) -> list[str]:
    """A paragraph on the peers' measurements that failed; nothing if none did."""
    if not results.failures:
        return []
    listed = "\n".join(f"- {failure}" for failure in results.failures)
    return [f"Measurements that failed, and were repeated within their round:\n\n{listed}"]


def limits_part(results: Results) -> list[str]:
    """The page's section on the limits."""
    table = limit_table(results)
    return ["## Costs of seeded mode and of states", table] if table else []


def page(results: Results, dates: list[str], command: str, memory: str = "") -> str:
    """The page `docs/reference/benchmarks.md`."""
    parts = [
        "# Benchmarks",
        f"Written by `{command}`; do not edit.",
        (
            "Ratios to torch's `DataLoader` over the same dataset in the same run: 2 workers, persistent, "
            "after a warm-up epoch. The samples are views of one preallocated array and cost next to "
            "nothing, but for the photos, so that transport is what is measured. Absolute rates hold for this "
            "machine only."
        ),
        "## Against torch, with the floor of each row",
        floor_table(results),
        (
            f"Medians of {len(results.memcpy)} interleaved rounds, measured on {' and '.join(dates)}; *rounds* gives "
            "the smallest and the largest ratio of a single round. For times, memory and CPU less is better."
        ),
        *limits_part(results),
        "## Every loader, batches per second",
        peer_table(results),
        *failures(results),
        *filter(None, [memory]),
        "## Memory bandwidth",
        memory_bandwidth(results).replace("\n", "\\\n"),
        "## The machine",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine().items())]),
        "## How it is measured",
        METHOD,
    ]
    if results.checksums:
        sums = {workload: total for (workload, _), total in sorted(results.checksums.items())}
        listed = ", ".join(f"{workload} `{total}`" for workload, total in sums.items())
        parts.append(f"Checksums of an epoch, the same from every loader: {listed}.")
    return "\n\n".join(parts) + "\n"


METHOD = f"""\
- Every measurement runs in a fresh process. Within a round each loader is measured once; the order turns
  around from round to round. Without workers the loaders take turns in one process instead.
- A rate is the median over whole epochs, from `iter()` to the last batch, checks excluded. The consumer
  of `{ASYNC}` is an `async for` on uvloop, that of `{ASYNC_PLAIN}` one on asyncio's own
  event loop; every other loader is read by a plain `for`.
- The consumer computes in one thread: more would fight the workers for the cores.
- Content: in the first round the CRC-32 of the whole warm-up epoch of every loader (each sample in its
  order, with its dtypes and shapes) is held against the one computed from the definition of the samples.
  In every round the position of every sample of the warm-up epoch is checked, and in every timed epoch
  the number that the consumer computes from each batch.
- The time to the first batch starts before the loader is made, torch and asyncloader being imported (which a
  script does at its top; asyncloader adds about 40 ms to torch's second). For forkserver, another loader of the
  same kind was used in the process before, so that its fork server runs.
  The measured script does not import torch at its top; where one does, spawned workers do so before any code of
  ours, and start in torch's own time.
- Memory is the sum of the proportional set sizes (PSS) of the process and its descendants, looked at from
  outside every 50 ms; *peak* covers the whole life of the process. A shared segment that is open but
  mapped nowhere at that moment (torch's batches on their way) is in nobody's PSS: the last memory row
  adds those.
- The shuffled epoch's dataset gives its indices; memory is the growth of the process's largest resident size. The
  uneven batches wait instead of computing (5 and 100 ms), so that two workers do not need two cores. What seeded mode
  costs a sample is measured without workers, where nothing hides it, over batches of 32 dicts.
- CPU seconds are the main process's, all threads, consumer included.
- `{FACADE}` and `{ASYNC}` are asyncloader's; torch `file_system` is torch's with that sharing strategy.
- Peers whose workers do not outlive an epoch (nodes, grain, spdl) read an endless repetition of it, and
  so are spared the start of an epoch. spdl threads has no worker processes but two threads in the main
  process; spdl arena has two threads in one process. webdataset reads no tar files here: only its loader
  is used.
- `python -m tests.benchmarks --against PATH` measures this checkout against another one instead of against torch, as
  a change is measured against the commit before it. Both stand side by side in every round, each in a process that
  checks whose package it imported. The table gives the geometric mean of the rounds' ratios, turned over where less is
  better, with its 95 % confidence bounds (Student's t on the logarithms), and the same over all rows. A row passes
  unless its upper bound is below 0.98, the mean of all unless its is below 0.99."""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
