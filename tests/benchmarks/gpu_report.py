"""From the measurements on a card to their tables, verdicts and section of the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .gpu_plan import (
    BATCH,
    BATCH_TIME,
    CACHED,
    COMPARED,
    DTYPES,
    END_RATIO,
    FED,
    LOADER_LOCK,
    LOADERS,
    LOCK,
    LOCK_S,
    OURS,
    PAGES,
    PARTS,
    PINNED,
    QUICK_LIMIT_S,
    SLOT_RATIO,
    SLOT_SIZES,
    SOAK,
    SOAK_S,
    SPDLS,
    STAGE,
    STAGES,
    STEP_LOADERS,
    STEP_OVER_LOADER,
    STEP_RATIO,
    STEP_WORKERS,
    UNLOCK,
    WORKERS,
    WRONG,
    cpu_metric,
    end_metric,
    slot_metric,
)
from .harness import Results
from .plan import FACADE

TITLE = "## GPU"
COMMAND = "python -m tests.benchmarks.gpu"


@dataclass(frozen=True)
class GpuVerdict:
    """A figure and its bound.

    Args:
        part: letter of `PARTS`.
        what: the comparison, in words.
        loader: of ours.
        value: measured, a median.
        low, high: smallest and largest of a single round.
        bound: the least or largest value allowed.
        sign: "at least", "more than" or "at most".
    """

    part: str
    what: str
    loader: str
    value: float
    low: float
    high: float
    bound: float
    sign: str

    @property
    def ok(self) -> bool:
        """Whether the bound is kept."""
        if self.sign == "at most":
            return self.value <= self.bound
        return self.value > self.bound if self.sign == "more than" else self.value >= self.bound


def ratio(results: Results, metric: str, mine: str, other: str, other_metric: str = "") -> tuple[float, float, float]:
    """Median of mine over median of the other's, and the smallest and largest ratio of the rounds that have both."""
    ours, theirs = results.values[metric, mine], results.values[other_metric or metric, other]
    rounds = [each / against for each, against in zip(ours, theirs, strict=False)]
    return statistics.median(ours) / statistics.median(theirs), min(rounds), max(rounds)


def verdicts(results: Results) -> list[GpuVerdict]:
    """Every wanted figure whose parts were measured."""
    found: list[GpuVerdict] = []
    for size in SLOT_SIZES:
        metric = slot_metric(size)
        if results.has(metric, STAGE) and results.has(metric, PINNED):
            figures = ratio(results, metric, STAGE, PINNED)
            found.append(GpuVerdict("a", f"{size}: {PINNED}", STAGE, *figures, SLOT_RATIO, "at least"))
    for dtype in DTYPES:
        for workers in _measured_workers(results, dtype):
            metric = end_metric(dtype, workers)
            for mine in (name for name in OURS if results.has(metric, name)):
                for other in (name for name in LOADERS if name not in OURS and results.has(metric, name)):
                    figures = ratio(results, metric, mine, other)
                    what = f"{dtype}, {workers} workers: {other}"
                    found.append(GpuVerdict("b", what, mine, *figures, END_RATIO, "more than"))
    for mine in (name for name in OURS if results.has(FED, name)):
        figures = ratio(results, FED, mine, mine, CACHED)
        found.append(GpuVerdict("c", "a step's time on a cached batch", mine, *figures, STEP_RATIO, "at most"))
    if results.has(LOCK, FACADE):
        rounds = results.values[LOCK, FACADE]
        figures = (statistics.median(rounds), min(rounds), max(rounds))
        found.append(GpuVerdict("d", "seconds to lock a GB", "a ring", *figures, LOCK_S, "at most"))
    if results.has(WRONG, FACADE):
        wrong = max(results.values[WRONG, FACADE])
        count = results.median(COMPARED, FACADE)
        found.append(
            GpuVerdict("e", f"batches that differ, of {count:,.0f}", FACADE, wrong, wrong, wrong, 0, "at most")
        )
    return found


def verdict_table(results: Results) -> str:
    """The figures with bounds in Markdown; empty if none was measured."""
    lines = ["| | against | of ours | measured | rounds | wanted | |", "|---|---|---|--:|--:|--:|---|"]
    for each in verdicts(results):
        said = "ok" if each.ok else "**short**"
        lines.append(
            f"| {each.part} | {each.what} | {_name(each.loader)} | **{_figure(each.value)}** "
            f"| {_figure(each.low)} to {_figure(each.high)} | {each.sign} {each.bound:g} | {said} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def slot_table(results: Results) -> str:
    """(a): GB/s in Markdown; empty if they were not measured."""
    sizes = [size for size in SLOT_SIZES if results.has(slot_metric(size), PINNED)]
    return _table(
        "from host to device, GB/s",
        sizes,
        (PINNED, *STAGES),
        lambda name, size: _rounds(results, slot_metric(size), name, lambda rate: f"{rate / 1e9:.1f}"),
    )


def end_table(results: Results, dtype: str) -> str:
    """(b): samples per second in Markdown; empty if they were not measured."""
    workers = _measured_workers(results, dtype)
    return _table(
        f"{dtype} images, samples/s",
        [f"{count} workers" for count in workers],
        LOADERS,
        lambda name, column: _rounds(results, end_metric(dtype, int(column.split()[0])), name, "{:,.0f}".format),
    )


def cpu_table(results: Results) -> str:
    """(b): CPU time of the main process in Markdown; empty if it was not measured."""
    columns = {f"{dtype}, {count}": (dtype, count) for dtype in DTYPES for count in _measured_workers(results, dtype)}
    return _table(
        "main process, CPU ms a batch",
        list(columns),
        LOADERS,
        lambda name, column: _rounds(results, cpu_metric(*columns[column]), name, lambda cpu: f"{cpu * 1e3:.2f}"),
    )


def step_table(results: Results) -> str:
    """(c): milliseconds in Markdown; empty if they were not measured."""
    columns = {"cached batch": CACHED, "fed by the loader": FED, "loader alone, a batch": BATCH_TIME}
    return _table(
        "a training step, ms",
        list(columns),
        STEP_LOADERS,
        lambda name, column: _rounds(results, columns[column], name, lambda time: f"{time * 1e3:.3f}"),
    )


def lock_table(results: Results) -> str:
    """(d): seconds per GB in Markdown; empty if they were not measured."""
    columns = {
        "to get the pages": PAGES,
        "to lock them": LOCK,
        "to unlock them": UNLOCK,
        "a loader's rings, pages and lock": LOADER_LOCK,
    }
    return _table(
        "page-locking, s for a GB",
        list(columns),
        (FACADE,),
        lambda name, column: _rounds(results, columns[column], name, "{:.3f}".format),
    )


def soak_line(results: Results) -> str:
    """(e) in words; empty if it was not measured."""
    if not results.has(WRONG, FACADE):
        return ""
    count, seconds = results.median(COMPARED, FACADE), results.median(SOAK_S, FACADE)
    wrong = max(results.values[WRONG, FACADE])
    return f"Bit-exactness: {count:,.0f} batches of random bits in {seconds:,.0f} s, {wrong:,.0f} of them different."


def tables(results: Results) -> list[str]:
    """All that was measured."""
    made = (
        verdict_table(results),
        slot_table(results),
        *(end_table(results, dtype) for dtype in DTYPES),
        cpu_table(results),
        step_table(results),
        lock_table(results),
        soak_line(results),
    )
    return [table for table in made if table]


def section(results: Results, command: str, rounds: int, machine: Mapping[str, str], notes: Sequence[str]) -> str:
    """The section of the page.

    Args:
        results: of all rounds.
        command: that made them.
        rounds: how many.
        machine: the machine's properties: name and value.
        notes: on parts that were left out.
    """
    said = [*notes, *(f"Failed: {each}." for each in results.failures)]
    return "\n\n".join(
        [
            TITLE,
            (
                f"Written by `{command}`: medians of {rounds} interleaved rounds; *rounds* gives the smallest and the "
                "largest figure of one of them. Rates hold for this machine only; the ratios are of one run."
            ),
            *tables(results),
            *(["\n".join(f"- {each}" for each in said)] if said else []),
            "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine.items())]),
            METHOD,
        ]
    )


def not_measured() -> str:
    """The section of the page before any measurement on a card."""
    counts = ", ".join(map(str, WORKERS))
    against = "torch with pin_memory, the same with a side-stream prefetcher, and SPDL"
    images = " and ".join(DTYPES)
    wanted = {
        "a": (f"bytes a second from slot to device, against {PINNED}", f"at least {SLOT_RATIO:g}"),
        "b": (
            f"samples a second with {counts} workers, {images} images, batches of {BATCH}, against {against}",
            f"more than {END_RATIO:g}",
        ),
        "c": (
            "a training step's time fed by the loader, against the same on a cached batch",
            f"at most {STEP_RATIO:g}",
        ),
        "d": ("seconds to page-lock a GB whose pages are there", f"at most {LOCK_S:g}"),
        "e": (f"batches whose bits differ, of {SOAK:,}", "0"),
    }
    lines = ["| | what | measured | wanted |", "|---|---|---|--:|"]
    lines += [f"| {part} | {wanted[part][0]} | not measured | {wanted[part][1]} |" for part in PARTS]
    return "\n\n".join(
        [
            TITLE,
            (
                f"Not measured: there was no card. `{COMMAND} --save` writes this section on a machine that has one, "
                f"with torch for CUDA; SPDL's rows are left out where `spdl` is not installed. With `--quick` no "
                f"measurement begins after {QUICK_LIMIT_S:.0f} s."
            ),
            "\n".join(lines),
            METHOD,
        ]
    )


METHOD = f"""\
- Each measurement is a process of its own; the order turns around from round to round.
- (a) One process fills a ring, and gives its slots to the stage that copies them, again and again; the consumer takes
  each batch at once and keeps none. The other side copies as many pinned tensors into four that stay on the device.
  Both take turns in one process. Batches are compared with their slots before and after the clock runs.
- (b) Samples are images of 3 x 224 x 224 that are there already, so that loading is measured and not decoding. The
  clock runs amid an epoch, when rings are page-locked, and the device is waited for at both ends. In the clock each
  image is summed on the device, for all loaders alike; sums and labels are checked afterwards, and the batches before
  the clock starts are compared whole. `AsyncDataLoader` is read by `async for` on uvloop.
- (c) A small convolutional net in bfloat16, {STEP_OVER_LOADER:g} times as long as our loader takes for a batch with
  {STEP_WORKERS} workers, timed by CUDA events from the end of one step to the end of the next; on the cached batch
  before and after each loader.
- (d) A ring of 1 GiB by itself; and what `stats()` says of a loader's rings (`device/page_lock_s`,
  `device/page_locked_bytes`).
- (e) Tensors of random bits, shapes and dtypes from seeds, with a weighted sum of all bytes from their worker. The sum
  is made again on the device from a batch that the host has dropped already, every 64th time behind a long kernel, in
  every second epoch in a stream of the consumer's own."""


def _measured_workers(results: Results, dtype: str) -> list[int]:
    return [count for count in (1, *WORKERS) if any(results.has(end_metric(dtype, count), name) for name in LOADERS)]


def _table(head: str, columns: Sequence[str], names: Sequence[str], cell: Callable[[str, str], str]) -> str:
    rows = [(name, [cell(name, column) for column in columns]) for name in names]
    rows = [row for row in rows if any(row[1])]
    if not rows:
        return ""
    lines = [f"| {head} | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    return "\n".join([*lines, *(f"| {_name(name)} | {' | '.join(cells)} |" for name, cells in rows)])


def _rounds(results: Results, metric: str, name: str, text: Callable[[float], str]) -> str:
    if not results.has(metric, name):
        return ""
    rounds = results.values[metric, name]
    median = text(results.median(metric, name))
    return median if len(rounds) == 1 else f"{median} ({text(min(rounds))} to {text(max(rounds))})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) == 0 else f"{value:.3f}"


def _name(loader: str) -> str:
    return f"`{loader}`" if loader in (*OURS, STAGE) else loader


def missing_note(available: Sequence[str]) -> list[str]:
    """A note if SPDL is not among the loaders."""
    return [] if set(SPDLS) <= set(available) else ["SPDL is not installed: its rows are left out."]
