"""Starts each measurement in a fresh process, watches its memory from outside, and collects the rounds.

Rounds are interleaved: every loader is measured once in a round, in an order that turns around from round
to round, so that a machine that slows down or warms up touches all alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .plan import PEERS, Job

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0  # for one job
SAMPLE_S = 0.05  # between two looks at the memory


@dataclass(frozen=True)
class Memory:
    """One look at a process tree, in bytes.

    Args:
        pss: the sum of the proportional set sizes.
        unmapped: shared memory that the tree holds open and has mapped nowhere: batches on their way.
    """

    pss: int
    unmapped: int


PEER_ATTEMPTS = 3


class JobFailed(Exception):
    """A measurement ended without a result: a loader failed, hung, or delivered wrong content."""


@dataclass
class Results:
    """The measured numbers: one per metric, loader and round."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])
    checksums: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    memcpy: list[float] = field(default_factory=list[float])
    failures: list[str] = field(default_factory=list[str])
    """Measurements of peers that failed and were repeated: which, and the last line of the reason."""

    def add(self, metric: str, loader: str, value: float) -> None:
        """Append this round's number."""
        self.values.setdefault((metric, loader), []).append(value)

    def median(self, metric: str, loader: str) -> float:
        """The median over the rounds. KeyError if it was not measured."""
        return statistics.median(self.values[metric, loader])

    def has(self, metric: str, loader: str) -> bool:
        """Whether it was measured."""
        return (metric, loader) in self.values

    def ratio(self, metric: str, loader: str, baseline: str) -> tuple[float, float, float]:
        """The ratio of the medians, and the smallest and largest ratio of any one round."""
        ours, theirs = self.values[metric, loader], self.values[metric, baseline]
        rounds = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return statistics.median(ours) / statistics.median(theirs), min(rounds), max(rounds)


def run_rounds(plan: Callable[[int], list[Job]], rounds: int, log: Callable[[str], None]) -> Results:
    """Run every job of `plan(round)` for each round.

    Raises:
        JobFailed: a job failed, a peer's three times in a row. The table would have a blank, so there is no table.
    """
    results = Results()
    for number in range(rounds):
        jobs = plan(number)
        started = time.monotonic()
        for job in jobs if number % 2 == 0 else reversed(jobs):
            record(job, *attempt(job, results, f"{job.loader}, {job.workload}", peer=job.loader in PEERS), results)
        results.memcpy.append(run_job(Job("memcpy", seconds=0.5))[0]["rate"])
        log(f"round {number + 1} of {rounds}: {len(jobs)} measurements in {time.monotonic() - started:.0f} s")
    return results


def attempt(job: Job, results: Results, name: str, *, peer: bool) -> tuple[dict[str, Any], list[tuple[float, Memory]]]:
    """Run the job; a peer's failure (a peer now and then delivers a batch twice) is noted, and the job is repeated.

    Args:
        job: the measurement.
        results: where the failure is noted.
        name: of the measurement, for the note.
        peer: whether its loader is a peer.

    Raises:
        JobFailed: it failed, a peer's three times in a row.
    """
    for _ in range(PEER_ATTEMPTS - 1 if peer else 0):
        try:
            return run_job(job)
        except JobFailed as failure:
            said = [line for line in str(failure).splitlines() if re.match(r"[\w.]+(Error|Content): ", line)]
            reason = said[-1] if said else str(failure).splitlines()[0]
            results.failures.append(f"{name}: {reason}")
    return run_job(job)


def record(job: Job, output: dict[str, Any], memory: list[tuple[float, Memory]], results: Results) -> None:
    """Add a job's numbers to those of its metrics and its loader."""
    if job.probe == "throughput":
        for way, rate in output["rate"].items():
            results.add(f"{job.workload}/{way}", job.loader, rate)
        results.add(f"cpu/{job.workload}", job.loader, output["cpu"]["touch"])
        if output["checksum"]:
            results.checksums[job.workload, job.loader] = output["checksum"]
    elif job.probe == "inline":
        for loader, ways in output["rate"].items():
            for way, rate in ways.items():
                results.add(f"inline/{job.workload}/{way}", loader, rate)
    elif job.probe == "first_batch":
        results.add(f"first/{job.start}", job.loader, output["seconds"])
    elif job.probe == "second_epoch":
        results.add("second", job.loader, output["seconds"])
    elif job.probe == "shuffle":
        results.add("shuffle/first", job.loader, output["seconds"])
        results.add("shuffle/memory", job.loader, output["memory"])
    elif job.probe == "line":
        results.add("line", job.loader, output["rate"])
    elif job.probe == "cost":
        results.add("seeded/cost", job.loader, output["seconds"])
    elif job.probe == "state":
        results.add("seeded/state", job.loader, output["state"])
        results.add("seeded/resume", job.loader, output["resume"])
    elif job.probe == "memory":
        begin, end = output["steady"]
        steady = [look for when, look in memory if begin <= when <= end]
        if not steady:
            raise JobFailed(f"{job}: no look at its memory fell between {begin} and {end}")
        results.add("memory/peak", job.loader, max(look.pss for _, look in memory))
        results.add("memory/steady", job.loader, statistics.median(look.pss for look in steady))
        results.add("memory/held", job.loader, statistics.median(look.pss + look.unmapped for look in steady))


def verify(results: Results) -> list[str]:
    """Hold the checksum of every loader against the reference; gives the names of those that differ."""
    workloads = {workload for workload, _ in results.checksums}
    references = {workload: run_job(Job("reference", workload))[0]["checksum"] for workload in workloads}
    return [
        f"{loader} on {workload}: {checksum}, reference {references[workload]}"
        for (workload, loader), checksum in results.checksums.items()
        if checksum != references[workload]
    ]


def run_job(
    job: Job, module: str = "tests.benchmarks.child", limit_s: float = LIMIT_S
) -> tuple[dict[str, Any], list[tuple[float, Memory]]]:
    """Run one job in a process of its own.

    Args:
        job: the measurement.
        module: what does it, given the job's JSON and the file for the result's.
        limit_s: the longest that it may take.

    Returns:
        Its result, and for the probe "memory" the samples: monotonic seconds, memory of the tree.

    Raises:
        JobFailed: it ended with an error or took too long; the text has the end of its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        place = ROOT
        if job.tree:  # these benchmarks and that package: the two that the child imports from where it runs
            place = Path(folder)
            (place / "tests").symlink_to(ROOT / "tests")
            (place / "asyncloader").symlink_to(Path(job.tree) / "asyncloader")
        samples: list[tuple[float, Memory]] = []
        done = threading.Event()
        samplers: list[threading.Thread] = []

        def watch(pid: int) -> None:
            if job.probe == "memory":
                samplers.append(threading.Thread(target=_sample, args=(pid, samples, done)))
                samplers[0].start()

        try:
            name = f"{job.probe} {job.workload} {job.loader} {job.start}"
            return run_program(module, job.to_json(), name, Path(folder), place, limit_s, watch), samples
        finally:
            done.set()
            for sampler in samplers:
                sampler.join()


def run_program(
    module: str,
    job: str,
    name: str,
    folder: Path,
    place: Path = ROOT,
    limit_s: float = LIMIT_S,
    watch: Callable[[int], None] | None = None,
) -> Any:
    """Run a module in a process of its own, which gets a job and the name of the file for its result as JSON.

    Args:
        module: the program.
        job: its first argument.
        name: what the error calls it.
        folder: a temporary one, for the files.
        place: where it runs.
        limit_s: the longest that it may take.
        watch: called with the process's pid once it runs.

    Raises:
        JobFailed: it ended with an error or took too long; the text has the end of its stderr.
    """
    output, errors = folder / "result.json", folder / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module, job, str(output)],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        if watch is not None:
            watch(process.pid)
        code: int | str = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = f"none after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the session's leftovers: some peers leave workers
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code != 0 or not output.exists():
        tail = errors.read_text(errors="replace")[-3000:]
        raise JobFailed(f"{name}: exit code {code}\n{tail}")
    return json.loads(output.read_text(encoding="utf-8"))


def _sample(pid: int, samples: list[tuple[float, Memory]], done: threading.Event) -> None:
    while not done.wait(SAMPLE_S):
        samples.append((time.monotonic(), tree_memory(pid)))


def tree_memory(root: int) -> Memory:
    """The memory of a process and its descendants; a process that ends during the call counts zero."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold anything; the parent is the second field after it.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    tree = {root}
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    mapped: set[int] = set()
    held: dict[int, int] = {}
    for pid in tree:
        with contextlib.suppress(OSError):
            mapped |= _mapped_shared(pid)
            held |= _open_shared(pid)
    unmapped = sum(size for inode, size in held.items() if inode not in mapped)
    return Memory(pss=sum(_pss(pid) for pid in tree), unmapped=unmapped)


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _is_shared(path: str) -> bool:
    return path.startswith(("/dev/shm/", "/memfd:"))


def _mapped_shared(pid: int) -> set[int]:
    """The inodes of the shared-memory segments that a process has mapped."""
    fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {int(each[4]) for each in fields if len(each) == 6 and _is_shared(each[5])}


def _open_shared(pid: int) -> dict[int, int]:
    """The shared-memory segments that a process has open: bytes in use, by inode."""
    found: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # already closed
            if _is_shared(str(entry.readlink())):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found
