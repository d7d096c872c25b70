"""The verdict on the bottleneck of a run, from made-up figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from asyncloader import DataLoader, Recovery
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.telemetry.counters import Recorder, Stage
from asyncloader.telemetry.diagnosis import Diagnosis, diagnose
from asyncloader.telemetry.run_figures import Run
from tests.helpers.datasets import Numbers

BATCHES = 100

Stages = Mapping[Stage, float]


def block(
    stages: Stages, number: int = BATCHES, slow: Mapping[Stage, float] | None = None, **sums: float
) -> list[float]:
    """A process's figures: the given seconds in each stage for each batch, with one batch in fifty slow; and sums."""
    recorder = Recorder()
    for stage, seconds in stages.items():
        for each in range(number):
            recorder.time(stage, slow[stage] if slow is not None and stage in slow and each % 50 == 7 else seconds)
    for key, value in sums.items():
        recorder.put(key, value)
    return [float(each) for each in recorder.block.tolist()]


def run(main: Stages, *workers: list[float], **known: Any) -> Run:
    """A run of a hundred batches in ten seconds that waited 9.5 s, unless `known` says otherwise."""
    values: dict[str, Any] = {
        "batches": BATCHES,
        "epochs": 1,
        "elapsed_s": 10.0,
        "wait_s": 9.5,
        "startup_s": 0.1 if workers else 0.0,
        "main_cpu_s": 0.5,
        "cpus": 8,
        "workers": len(workers),
        "prefetch_factor": 2 if workers else None,
        "batch_size": 8,
        **known,
    }
    sums = {
        key: values.pop(key)
        for key in ("sampled_s", "sampled_cpu_s", "delayed_s", "retries", "requests", "retry_wait_s")
        if key in values
    }
    blocks = {-1: block({"consumer": 0.001, **main}, **sums), **dict(enumerate(workers))}
    return Run(blocks=blocks, **values)


def worker(
    fetch: float,
    cpu: float,
    number: int = BATCHES // 2,
    slow: Mapping[Stage, float] | None = None,
    starts: int = 1,
    write: float = 1e-4,
    snapshot: float = 0.0,
    **sums: float,
) -> list[float]:
    """A worker that has fetched half of the batches, and computed for `cpu` seconds in total."""
    batches = block(
        {"fetch": fetch, "collate": 1e-5, "write": write, "snapshot": snapshot}, number, slow, cpu_s=cpu, **sums
    )
    return [each + start for each, start in zip(batches, block({"start_process": 0.01}, starts), strict=True)]


WAITS = {"sampled_s": 5.0, "sampled_cpu_s": 0.2}
COMPUTES = {"sampled_s": 5.0, "sampled_cpu_s": 4.9}
RUNS: dict[str, tuple[Run, str, dict[str, Any], str]] = {
    "a consumer that hardly waits": (
        run({}, worker(0.01, 1), worker(0.01, 1), wait_s=0.2),
        "consumer",
        {},
        "nothing to change",
    ),
    "one start, in a run that is healthy otherwise": (
        run({}, worker(0.01, 1), worker(0.01, 1), wait_s=1.2, startup_s=1.0),
        "consumer",
        {},
        "nothing to change",
    ),
    "starts, each epoch anew": (
        run({}, worker(0.05, 0.5, starts=10), worker(0.05, 0.5, starts=10), startup_s=8.0, epochs=10),
        "startup",
        {"num_workers": 8, "persistent_workers": True},
        "Starting workers took 80%",
    ),
    "one start of workers that are kept": (
        run({}, worker(0.001, 0.05), worker(0.001, 0.05), startup_s=8.0, persistent=True, cpus=2),
        "startup",
        {"num_workers": 0},
        "Starting workers took 80%",
    ),
    "a sampler that is slow": (
        run({"sampler": 0.09}, worker(0.01, 0.5), worker(0.01, 0.5)),
        "sampler",
        {},
        "90 ms for a batch",
    ),
    "a sampler whose states cost much": (
        run({"sampler": 0.001, "snapshot": 0.08}, worker(0.01, 0.5), worker(0.01, 0.5)),
        "snapshots",
        {"snapshot_every_n_steps": 100},
        "81% of the time",
    ),
    "a stream whose states cost much": (
        run({}, worker(0.02, 0.5, snapshot=0.18), worker(0.02, 0.5, snapshot=0.18), iterable=True, snapshot_every=10),
        "snapshots",
        {"snapshot_every_n_steps": 1000},
        "91% of the time",
    ),
    "a map dataset whose states cost much": (
        run({}, worker(0.02, 0.5, snapshot=0.18), worker(0.02, 0.5, snapshot=0.18), keeps_states=True),
        "snapshots",
        {},
        "snapshot_every_n_steps=0 saves none",
    ),
    "worker threads that wait": (
        run({"transfer": 1e-4}, worker(0.19, 0.2), worker(0.19, 0.2), in_threads=True),
        "fetch",
        {"num_workers": 32},
        "up to",
    ),
    "worker threads that compute": (
        run({"transfer": 1e-4}, worker(0.19, 9), worker(0.19, 9), in_threads=True),
        "compute",
        {},
        "as the samples' code releases the GIL, which a trial shows; worker processes have a GIL each",
    ),
    "worker threads that wait for the GIL": (
        run({"transfer": 6e-3}, worker(0.19, 5), worker(0.19, 5), in_threads=True),
        "fetch",
        {},
        "gains nothing from more threads",
    ),
    "worker threads that wait for the GIL most of the time": (
        run({"transfer": 0.06}, worker(0.19, 5), worker(0.19, 5), in_threads=True),
        "consumer process",
        {},
        "its code or that of the samples holds the GIL",
    ),
    "a store that fails": (
        run({}, worker(0.1, 0.5), worker(0.1, 0.5), retries=40.0, requests=140.0, retry_wait_s=10.0),
        "store",
        {},
        "failed 40 of 140 requests",
    ),
    "workers that exceed their memory limit": (
        run({}, worker(0.1, 0.5), worker(0.1, 0.5), retirements=30, memory_limit=1 << 20),
        "memory",
        {"worker_memory_limit": 4 << 20},
        "30 workers were replaced",
    ),
    "forked workers that exceed their memory limit": (
        run({}, worker(0.1, 0.5), worker(0.1, 0.5), retirements=30, memory_limit=1 << 20, forks=True),
        "memory",
        {"worker_memory_limit": 4 << 20},
        "share() keeps one for all",
    ),
    "a ring that is too small": (
        run({}, worker(0.1, 5, write=0.09), worker(0.1, 5, write=0.09), oversize=100, ring_needed=1 << 20),
        "ring",
        {"ring_bytes": 1 << 20},
        "100 of 100 batches did not fit",
    ),
    "a consumer that hoards": (run({}, worker(0.1, 0.5), worker(0.1, 0.5), ring_copies=80), "ring", {}, "hold fewer"),
    "tiny batches": (
        run(
            {"consumer": 0.0001},
            worker(1e-5, 0.01),
            worker(1e-5, 0.01),
            elapsed_s=0.06,
            wait_s=0.05,
            startup_s=0.0,
            main_cpu_s=0.03,
        ),
        "overhead",
        {"num_workers": 0},
        "make batches larger",
    ),
    "a process that takes no batches": (
        run({"transfer": 0.05}, worker(0.01, 0.5), worker(0.01, 0.5)),
        "consumer process",
        {"prefetch_factor": 4},
        "50 ms before this process took note",
    ),
    "a stream that most workers have no part of": (
        run({}, worker(0.1, 0.5, BATCHES), worker(0, 0, 0), worker(0, 0, 0), iterable=True),
        "shards",
        {},
        "2 of 3 workers",
    ),
    "one worker that is slow": (
        run({}, worker(0.5, 0.5, 20), worker(0.05, 0.5, 40), worker(0.05, 0.5, 40)),
        "slow worker",
        {},
        "Worker 0 takes 10.0 times",
    ),
    "batches behind one that is slow": (
        run({"order": 0.05}, worker(0.02, 0.5, slow={"fetch": 2.0}), worker(0.02, 0.5, slow={"fetch": 2.0})),
        "order",
        {},
        "waited 50 ms for an earlier one",
    ),
    "all CPUs busy": (
        run({}, worker(0.19, 9), worker(0.19, 9), cpus=2, main_cpu_s=0.9),
        "cpus",
        {},
        "All 2 CPUs are busy",
    ),
    "all CPUs busy, half of them with the consumer": (
        run({}, worker(0.3, 3, delayed_s=6), worker(0.3, 3, delayed_s=6), cpus=2, main_cpu_s=13.5),
        "cpus",
        {},
        "torch.set_num_threads",
    ),
    "a dataset that computes, in too few workers": (
        run({}, worker(0.19, 9.4), worker(0.19, 9.4)),
        "compute",
        {"num_workers": 8},
        "Samples cost computing",
    ),
    "a dataset that computes, without workers": (
        run({"fetch": 0.095}, main_cpu_s=9.9, **COMPUTES),
        "compute",
        {"num_workers": 8},
        "Samples cost computing",
    ),
    "decoding, without workers": (
        run({"fetch": 0.001, "decode": 0.094}, main_cpu_s=9.9, **COMPUTES),
        "compute",
        {"num_workers": 8},
        "mostly in decode",
    ),
    "a dataset that waits, without workers": (
        run({"fetch": 0.095}, **WAITS),
        "fetch",
        {"num_workers": 32},
        "Samples cost waiting",
    ),
    "a dataset that waits, in too few workers": (
        run({}, worker(0.19, 0.5), worker(0.19, 0.5), cpus=2),
        "fetch",
        {"num_workers": 32},
        "workers wait for their reads",
    ),
    "an async dataset with few samples at a time": (
        run({}, worker(0.19, 0.5), asynchronous=True, concurrency=8),
        "fetch",
        {"num_workers": 4, "concurrency": 256},
        "Samples cost waiting",
    ),
    "a stream that waits": (
        run({}, worker(0.19, 0.5), worker(0.19, 0.5), iterable=True),
        "fetch",
        {},
        "num_workers=32 would make it up to 8.4 times as fast, if the stream has as many parts (shards)",
    ),
    "a dataset of eight streams that waits": (
        run({}, worker(0.19, 0.5), worker(0.19, 0.5), iterable=True, streams=8),
        "fetch",
        {"num_workers": 8},
        "workers wait for their reads",
    ),
    "a stream that computes": (
        run({}, worker(0.095, 9.4, BATCHES), iterable=True, cpus=4),
        "compute",
        {},
        "num_workers=4 would make it about 3.",
    ),
    "a dataset that computes beside other programs": (
        run({}, worker(0.095, 4.7, BATCHES, delayed_s=4.7), cpus=2, main_cpu_s=0.1, others_cpu=1.5),
        "cpus",
        {"num_workers": 2},
        "also with other programs, of which 3.0 want one at a time",
    ),
    "the same, without workers": (
        run({"fetch": 0.095}, sampled_s=5.0, sampled_cpu_s=2.4, delayed_s=2.4, cpus=2, main_cpu_s=4.7, others_cpu=1.5),
        "compute",
        {"num_workers": 2},
        "less if other programs go on using the CPUs",
    ),
    "tiny batches, whose workers sleep and wake all the time": (
        run(
            {"consumer": 0.0001},
            worker(1e-5, 0.01, delayed_s=0.01),
            worker(1e-5, 0.01, delayed_s=0.01),
            elapsed_s=0.06,
            wait_s=0.05,
            startup_s=0.0,
            main_cpu_s=0.03,
            cpus=2,
            others_cpu=0.1,
        ),
        "overhead",
        {"num_workers": 0},
        "make batches larger. Set num_workers=0: at least",
    ),
    "a control group whose quota is used up": (
        run({}, worker(0.19, 3.5, delayed_s=5), worker(0.19, 3.5, delayed_s=5), cpus=2, cpu_limit=0.7, main_cpu_s=0.1),
        "cpus",
        {},
        "The 0.7 CPUs that the control group's quota allows are used up",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_bounds_it_and_what_to_change(name: str) -> None:
    """The verdict names the bottleneck and the change; its text has the figures and the options to set."""
    of, bound, change, words = RUNS[name]
    found = diagnose(of)
    assert (found.bound, found.change) == (bound, change), found
    assert not (of.persistent and "persistent_workers" in found.text)
    assert words in found.text
    assert found.text.endswith(".")
    assert "\n" not in found.text
    assert found.gain > 1.1 if change else found.gain == 1
    assert all(f"{option}={value!r}" in found.text for option, value in change.items())


@pytest.mark.parametrize(
    ("name", "promise", "most"),
    [
        ("a dataset that waits, without workers", "up to", 16),
        ("a dataset that waits, in too few workers", "up to", 9),
        ("an async dataset with few samples at a time", "up to", 80),
        ("a dataset that computes, without workers", "about", 8),
        ("a dataset that computes beside other programs", "up to", 1.8),  # two of five share what one of four had
        ("the same, without workers", "up to", 1.8),
        ("starts, each epoch anew", "at least", 9),
    ],
)
def test_what_only_a_trial_can_tell_is_not_promised(name: str, promise: str, most: float) -> None:
    """Waiting may be for a shared resource, and other programs may go on: the gain is an upper bound."""
    found = diagnose(RUNS[name][0])
    assert found.promise == promise
    assert f": {promise} {found.gain:.1f} times as fast" in found.text
    assert 1.1 < found.gain < most


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", RUNS)
def test_what_is_advised_is_an_option(name: str) -> None:
    """`clone` accepts each advised option."""
    of, _, change, _ = RUNS[name]
    loader = DataLoader[Any](
        Numbers(4), num_workers=of.workers, seed=1, recovery=Recovery(worker_memory_limit=of.memory_limit)
    )
    clone = loader.clone(**change)
    names = {"snapshot_every_n_steps": "snapshot_every"}
    assert {option: getattr(EpochConfig.of(clone), names.get(option, option)) for option in change} == change


@pytest.mark.parametrize(
    ("batches", "elapsed", "text"),
    [(0, 0.0, "Nothing was loaded yet."), (3, 9.0, "3 batches in 9.00 s are too few to judge.")],
)
def test_too_little_to_judge(batches: int, elapsed: float, text: str) -> None:
    """The verdict is unknown, without advice."""
    found = diagnose(run({}, batches=batches, elapsed_s=elapsed))
    assert found == Diagnosis("unknown", {}, {}, 1.0, text)
