"""What loaders choose for themselves, each beside its own best fixed setting, on the planted runs of `tests.verdicts`.

    python -m tests.benchmarks.autotune_peers [--seconds 40] [--fixed 5] [--rows slow,lock]

Ours is ``num_workers="auto"``, or ``concurrency="auto"`` for awaited samples; tf.data has AUTOTUNE for its map and its
prefetch; Grain has `pick_performance_config`. Each reads the same samples in batches of 8 for `--seconds`, in which the
last quarter counts, and then with fixed numbers for `--fixed` seconds each, twice, in turn. *of its best* is the rate
with the choice, as a share of the best rate with a fixed number of the same loader: it compares choices, not loaders.

datapath-doctor watches torch's DataLoader with two workers, and advises in words: it names no number to be measured.

tf.data calls Python functions in threads of one process, so that samples which compute share its GIL: more threads wait
at a time, and no more compute. It gets a pool of 64 threads; by default it has as many as there are CPUs, which leaves
no choice. Grain's workers read with its default of 16 threads, or with those that it picks. A peer that is not
installed is left out, and one that cannot read a row's samples says why. `tensorflow-cpu`, `grain` and
`datapath-doctor` need an environment of their own: the first wants another protobuf than `make bench` has.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncloader import DataLoader
from tests.verdicts.measuring import rate
from tests.verdicts.planted import AsyncPlanted, Locked, Planted, nothing, sleeps

BATCH = 8
LENGTH = 800_000
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
AT_A_TIME = (8, 32, 64, 256)
"""Fixed numbers where samples wait at a time in threads or coroutines, of which there may be more than processes."""
FEWEST = 8
"""Batches that are read at least: two of them make a rate."""
CHOOSES = None
"""In place of a number: the loader chooses."""


class Row(NamedTuple):
    """A planted run.

    Attributes:
        name: the planted condition.
        dataset: makes the dataset.
        consume: called with each batch.
        awaited: the same samples, awaited, for a loader that can; None: it reads `dataset`.
        numbers: fixed settings, for a loader that has none of its own.
    """

    name: str
    dataset: Callable[[], Any]
    consume: Callable[[Any], None] = nothing
    awaited: Callable[[], Any] | None = None
    numbers: Sequence[int] = NUMBERS


ROWS = (
    Row("slow reads", lambda: Planted(11, LENGTH, waits=0.004)),
    Row("computing", lambda: Planted(11, LENGTH, computes=0.003)),
    Row("one lock that all workers wait for", lambda: Locked(11, LENGTH, 0.004)),
    Row("slow consumer", lambda: Planted(11, LENGTH, waits=0.0005), sleeps(0.02)),
    Row(
        "a store that waits",
        lambda: Planted(11, LENGTH, waits=0.1),
        awaited=lambda: AsyncPlanted(11, LENGTH, waits=0.1),
        numbers=AT_A_TIME,
    ),
)


class Loader(NamedTuple):
    """A loader that chooses.

    Attributes:
        name: of the table.
        module: that it needs.
        open: returns an iterator of batches, given the row, a number or `CHOOSES`, and a stack of what ends it; and a
            function that says in words what is chosen now.
        numbers: fixed settings; None: those of the row.
    """

    name: str
    module: str
    open: Callable[[Row, int | None, ExitStack], tuple[Iterator[Any], Callable[[], str]]]
    numbers: Sequence[int] | None = None


def ours(row: Row, number: int | None, stack: ExitStack) -> tuple[Iterator[Any], Callable[[], str]]:
    """Open our loader."""
    setting = "num_workers" if row.awaited is None else "concurrency"
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 1, setting: "auto" if number is CHOOSES else number}
    if setting == "num_workers":
        options["multiprocessing_context"] = "fork"
    dataset = row.dataset() if row.awaited is None else row.awaited()
    loader = stack.enter_context(DataLoader[Any](dataset, **options))
    return iter(loader), lambda: f"{setting}={int(getattr(loader, setting))}"


def tf_data(row: Row, number: int | None, stack: ExitStack) -> tuple[Iterator[Any], Callable[[], str]]:
    """Open a pipeline of tf.data."""
    tf = importlib.import_module("tensorflow")
    dataset = row.dataset()
    many = tf.data.AUTOTUNE if number is CHOOSES else number

    def fetch(index: Any) -> Any:
        return dataset[int(index)].numpy()

    pipeline = tf.data.Dataset.range(LENGTH).map(
        lambda index: tf.numpy_function(fetch, [index], tf.uint8), num_parallel_calls=many
    )
    pipeline = pipeline.batch(BATCH).prefetch(tf.data.AUTOTUNE if number is CHOOSES else 4)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 64
    return pipeline.with_options(options).as_numpy_iterator(), lambda: "AUTOTUNE"


class _Arrays:
    """Random access for Grain, which collates NumPy arrays."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.dataset[index])


def grain(row: Row, number: int | None, stack: ExitStack) -> tuple[Iterator[Any], Callable[[], str]]:
    """Open a pipeline of Grain."""
    importlib.import_module("absl.flags").FLAGS(["benchmark"])
    library = importlib.import_module("grain")
    source = library.MapDataset.source(_Arrays(row.dataset())).batch(BATCH)
    if number is CHOOSES:
        picked = library.experimental.pick_performance_config(
            source.to_iter_dataset(), ram_budget_mb=2048, max_workers=None, max_buffer_size=None
        )
        read, many = picked.read_options, picked.multiprocessing_options
    else:
        read, many = library.ReadOptions(), library.MultiprocessingOptions(num_workers=number)
    stream = source.to_iter_dataset(read).mp_prefetch(many)
    return iter(stream), lambda: f"num_workers={many.num_workers}"


LOADERS = (
    Loader("asyncloader", "asyncloader", ours),
    Loader("tf.data AUTOTUNE", "tensorflow", tf_data),
    Loader("Grain pick_performance_config", "grain", grain, numbers=NUMBERS[:5]),
)


def advice(row: Row, seconds: float) -> str:
    """Return what datapath-doctor says of torch's DataLoader with two workers."""
    profilers = importlib.import_module("datapath_doctor.collectors.dataloader_profiler")
    engines = importlib.import_module("datapath_doctor.engine")
    plain = torch.utils.data.DataLoader(row.dataset(), BATCH, num_workers=2, multiprocessing_context="fork")
    watched = profilers.DataLoaderProfiler(plain, num_workers=2, prefetch_factor=2)
    until = time.perf_counter() + seconds
    for batch in watched:
        row.consume(batch)
        watched.record_compute_done()
        if time.perf_counter() > until:
            break
    found = engines.RuleEngine.with_default_rules().run(watched.samples)
    return "; ".join(f"{each.title}: {each.suggested_fix}" for each in found) or "nothing"


def read(loader: Loader, row: Row, number: int | None, seconds: float) -> tuple[list[float], str]:
    """Read for so long from the first batch on, and at least `FEWEST` batches. Returns when they came, from the first
    on, and what was chosen.
    """
    with ExitStack() as stack:
        batches, chosen = loader.open(row, number, stack)
        came: list[float] = []
        for batch in islice(batches, LENGTH // BATCH):
            row.consume(batch)
            came.append(time.perf_counter())
            if came[-1] - came[0] > seconds and len(came) >= FEWEST:
                break
        words = chosen()
        del batches
    return [at - came[0] for at in came], words


def line(loader: Loader, row: Row, seconds: float, fixed: float) -> str:
    """Measure a loader on a row, and return its line of the table."""
    came, chosen = read(loader, row, CHOOSES, seconds)
    with_choice = rate(came, 0.75 * seconds)
    rates: dict[int, list[float]] = {number: [] for number in loader.numbers or row.numbers}
    for _ in range(2):
        for number, each in rates.items():
            each.append(rate(read(loader, row, number, fixed)[0], min(0.5, fixed / 4)))
    best = max(rates, key=lambda number: statistics.mean(rates[number]))
    most = statistics.mean(rates[best])
    return (
        f"| {row.name} | {loader.name} | {chosen} | {with_choice:.1f} | {best}: {most:.1f} | {with_choice / most:.0%} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--fixed", type=float, default=5.0)
    parser.add_argument("--rows", default="", help="parts of names, with commas between them")
    given = parser.parse_args(argv)
    print("| planted | loader | chose | batches/s | best fixed | of its best |")
    print("|---|---|---|--:|--:|--:|")
    for row in ROWS:
        if not any(part in row.name for part in given.rows.split(",")):
            continue
        for loader in LOADERS:
            if importlib.util.find_spec(loader.module) is None:
                continue
            try:
                print(line(loader, row, given.seconds, given.fixed), flush=True)
            except Exception as error:
                why = str(error).strip().splitlines()[-1:] or [""]
                print(f"| {row.name} | {loader.name} | {type(error).__name__}: {why[0]} | | | |", flush=True)
        if importlib.util.find_spec("datapath_doctor") is not None:
            print(f"| {row.name} | datapath-doctor | {advice(row, given.fixed)} | | | |", flush=True)


if __name__ == "__main__":
    main()
