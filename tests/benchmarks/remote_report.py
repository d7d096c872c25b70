"""From the measurements over a store to their tables, verdicts and section of the page."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .harness import Results
from .remote_plan import (
    BARE,
    BATCH,
    CPU_RATIO,
    IN_FLIGHT,
    LATENCIES,
    LIMIT_SHARE,
    MAIN,
    OBJECTS_KIND,
    OURS,
    OURS_TAR,
    PEER_RATIO,
    PEERS,
    TAR_KINDS,
    TAR_LATENCIES,
    TAR_RATIO,
    TORCH_BLOCKING,
    TORCH_RATIO,
    WEBDATASET,
    WORKERS,
    Row,
)

TITLE = "## Remote objects"
LOOPS = tuple(name for name in OURS if name != OURS_TAR)
"""Ours over an asynchronous map dataset, for which the floors hold."""


@dataclass(frozen=True)
class RemoteVerdict:
    """A figure and its bound.

    Args:
        what: the comparison, in words.
        loader: of ours.
        value: measured ratio, of medians.
        bound: that it must reach, or may reach.
        at_most: which of the two.
    """

    what: str
    loader: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def ok(self) -> bool:
        """Whether the bound is kept."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def attainable(results: Results, latency: int) -> float:
    """Samples a second that concurrency, latency and a bare client allow: the smaller of two figures."""
    return min(IN_FLIGHT * 1000 / latency, results.median(Row(OBJECTS_KIND, latency, "").metric, BARE[IN_FLIGHT]))


def verdicts(results: Results) -> list[RemoteVerdict]:
    """Every wanted figure whose parts were measured."""
    found: list[RemoteVerdict] = []
    for latency in LATENCIES:
        row = Row(OBJECTS_KIND, latency, "")
        peers = {name: results.median(row.metric, name) for name in PEERS if results.has(row.metric, name)}
        for loader in (name for name in LOOPS if results.has(row.metric, name)):
            rate = results.median(row.metric, loader)
            if latency == MAIN and results.has(row.metric, TORCH_BLOCKING):
                against = results.median(row.metric, TORCH_BLOCKING)
                found.append(RemoteVerdict(f"{latency} ms: {TORCH_BLOCKING}", loader, rate / against, TORCH_RATIO))
            if peers:
                best = max(peers, key=lambda name: peers[name])
                what = f"{latency} ms: the best peer ({best})"
                found.append(RemoteVerdict(what, loader, rate / peers[best], PEER_RATIO))
            if results.has(row.metric, BARE[IN_FLIGHT]):
                what = f"{latency} ms: what concurrency, latency and a bare client allow"
                found.append(RemoteVerdict(what, loader, rate / attainable(results, latency), LIMIT_SHARE))
            bare = [results.median(row.cpu, name) for name in BARE.values() if results.has(row.cpu, name)]
            if latency == MAIN and bare:
                cpu = results.median(row.cpu, loader) / min(bare)
                what = f"{latency} ms: CPU time an object, the cheaper bare client's"
                found.append(RemoteVerdict(what, loader, cpu, CPU_RATIO, at_most=True))
    for latency in TAR_LATENCIES:
        for kind, size in TAR_KINDS.items():
            key = Row(kind, latency, "").metric
            if results.has(key, OURS_TAR) and results.has(key, WEBDATASET):
                ratio = results.ratio(key, OURS_TAR, WEBDATASET)[0]
                what = f"{latency} ms: {WEBDATASET}, samples of {size}"
                found.append(RemoteVerdict(what, OURS_TAR, ratio, TAR_RATIO))
    return found


def verdict_table(results: Results) -> str:
    """The wanted figures in Markdown."""
    lines = ["| against | loader | ratio | wanted | |", "|---|---|--:|--:|---|"]
    for each in verdicts(results):
        sign = "at most" if each.at_most else "at least"
        said = "ok" if each.ok else "**short**"
        lines.append(f"| {each.what} | {_name(each.loader)} | **{each.value:.2f}** | {sign} {each.bound:g} | {said} |")
    return "\n".join(lines)


def rate_table(results: Results) -> str:
    """Every loader's samples per second in Markdown, a column for each latency; and its CPU time."""
    measured = [each for each in LATENCIES if results.has(Row(OBJECTS_KIND, each, "").metric, OURS[0])]
    lines = [
        f"| 64 KB objects, samples/s | {' | '.join(f'{each} ms' for each in measured)} | CPU s for 1,000, {MAIN} ms |",
        "|---|" + "--:|" * (len(measured) + 1),
    ]
    for loader in (TORCH_BLOCKING, *PEERS, *BARE.values(), *OURS):
        cells = [_rate(results, Row(OBJECTS_KIND, latency, loader)) for latency in measured]
        main = Row(OBJECTS_KIND, MAIN, loader)
        cpu = f"{results.median(main.cpu, loader) * 1000:.3f}" if results.has(main.cpu, loader) else ""
        if any(cells):
            lines.append(f"| {_name(loader)} | {' | '.join(cells)} | {cpu} |")
    return "\n".join(lines)


def tar_table(results: Results) -> str:
    """The samples per second out of tar files in Markdown; empty if they were not measured."""
    columns = [(kind, latency) for kind in TAR_KINDS for latency in TAR_LATENCIES]
    columns = [each for each in columns if results.has(Row(*each, "").metric, OURS_TAR)]
    if not columns:
        return ""
    heads = " | ".join(f"{TAR_KINDS[kind]}, {latency} ms" for kind, latency in columns)
    lines = [f"| tar files, samples/s | {heads} |", "|---|" + "--:|" * len(columns)]
    for loader in (WEBDATASET, OURS_TAR):
        cells = [_rate(results, Row(kind, latency, loader)) for kind, latency in columns]
        lines.append(f"| {_name(loader)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(results: Results) -> list[str]:
    """All tables."""
    return [table for table in (verdict_table(results), rate_table(results), tar_table(results)) if table]


def section(results: Results, dates: list[str], command: str, load: float) -> str:
    """The section of the page.

    Args:
        results: of all rounds.
        dates: the days on which they were measured.
        command: the command of the last day.
        load: on average the processes that wanted to run on that day, ours included.
    """
    rounds = max(map(len, results.values.values()))
    cores = len(os.sched_getaffinity(0))
    return "\n\n".join(
        [
            TITLE,
            (
                f"Samples read by {WORKERS} workers in batches of {BATCH}, from a store on this machine that waits "
                f"before it answers. Written by `{command}`: medians of {rounds} interleaved rounds, measured on "
                f"{' and '.join(dates)}, on {cores} cores that the store shares, with {load:.1f} processes that "
                "wanted to run on average. Rates hold for this machine only; the ratios are of one run."
            ),
            *tables(results),
            *_failures(results),
            METHOD,
        ]
    )


METHOD = f"""\
- Each measurement is a process of its own. It reads in the middle of an epoch, from a second after the first batch on.
- Every sample is checked: it is an object of the store, begins and ends as it, and comes once; one in each batch is
  compared whole. Samples are uint8 arrays of an object's bytes; order is kept where the loader can keep it, but for
  SPDL's, which is faster without.
- Blocking clients are `http.client` with one open connection a thread; asynchronous ones are aiohttp, on uvloop where
  the loader lets us choose. Ours are `HttpTransport`, with its checks and retries. 256 samples are in flight in each
  of our workers, which is the default.
- CPU time is that of the loader's process and all its descendants, not of the store.
- What concurrency, latency and a bare client allow: the smaller of {IN_FLIGHT} / latency and the rate of one bare
  aiohttp loop with {IN_FLIGHT} in flight, which makes no batches and moves nothing between processes."""


def _rate(results: Results, row: Row) -> str:
    if not results.has(row.metric, row.loader):
        return ""
    rounds = results.values[row.metric, row.loader]
    median = f"{results.median(row.metric, row.loader):,.0f}"
    return median if len(rounds) == 1 else f"{median} ({min(rounds):,.0f} to {max(rounds):,.0f})"


def _failures(results: Results) -> list[str]:
    if not results.failures:
        return []
    return ["Measurements that failed, and were repeated:\n\n" + "\n".join(f"- {each}" for each in results.failures)]


def _name(loader: str) -> str:
    if loader not in OURS:
        return loader
    name, comma, rest = loader.partition(",")
    return f"`{name}`{comma}{rest}"
