"""The verdict on the bottleneck of a run, from made-up figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncloader import DataLoader, Recovery
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.telemetry.counters import Recorder, Stage
from asyncloader.telemetry.diagnosis import Diagnosis, diagnose
from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.slow_samples import SLOW_BYTES, SlowSamples, figures, joined
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
RUNS: dict[str, tuple[Run, str, tuple[dict[str, Any], ...], str]] = {
    "a consumer that hardly waits": (
        run({}, worker(0.01, 1), worker(0.01, 1), wait_s=0.2),
        "consumer",
        (),
        "nothing to change",
    ),
    "one start, in a run that is healthy otherwise": (
        run({}, worker(0.01, 1), worker(0.01, 1), wait_s=1.2, startup_s=1.0),
        "consumer",
        (),
        "nothing to change",
    ),
    "starts, each epoch anew": (
        run({}, worker(0.05, 0.5, starts=10), worker(0.05, 0.5, starts=10), startup_s=8.0, epochs=10),
        "startup",
        ({"persistent_workers": True},),
        "Starting workers took 80%",
    ),
    "starts that take a tenth of the time": (
        run({}, worker(0.19, 0.5, starts=10), worker(0.19, 0.5, starts=10), startup_s=1.0, epochs=10),
        "fetch",
        ({"num_workers": 4}, {"num_workers": 8}, {"persistent_workers": True}),
        "workers wait for their reads",
    ),
    "a sampler that is slow": (
        run({"sampler": 0.09}, worker(0.01, 0.5), worker(0.01, 0.5)),
        "sampler",
        (),
        "90 ms for a batch",
    ),
    "a sampler whose states cost much": (
        run({"sampler": 0.001, "snapshot": 0.08}, worker(0.01, 0.5), worker(0.01, 0.5)),
        "snapshots",
        ({"snapshot_every_n_steps": 100},),
        "81% of the time",
    ),
    "a map dataset whose states cost much": (
        run({}, worker(0.02, 0.5, snapshot=0.18), worker(0.02, 0.5, snapshot=0.18), keeps_states=True),
        "snapshots",
        (),
        "snapshot_every_n_steps=0 saves none",
    ),
    "worker threads that wait": (
        run({"transfer": 1e-4}, worker(0.19, 0.2), worker(0.19, 0.2), in_threads=True),
        "fetch",
        ({"num_workers": 4}, {"num_workers": 8}),
        "workers wait for their reads",
    ),
    "worker threads that compute": (
        run({"transfer": 1e-4}, worker(0.19, 9), worker(0.19, 9), in_threads=True),
        "compute",
        (),
        "Threads share the GIL; worker processes have a GIL each.",
    ),
    "worker threads that wait for the GIL most of the time": (
        run({"transfer": 0.06}, worker(0.19, 5), worker(0.19, 5), in_threads=True),
        "consumer process",
        (),
        "its code or that of the samples holds the GIL",
    ),
    "a store that fails": (
        run({}, worker(0.1, 0.5), worker(0.1, 0.5), retries=40.0, requests=140.0, retry_wait_s=10.0),
        "store",
        (),
        "failed 40 of 140 requests",
    ),
    "workers that exceed their memory limit": (
        run({}, worker(0.1, 0.5), worker(0.1, 0.5), retirements=30, memory_limit=1 << 20),
        "memory",
        ({"worker_memory_limit": 4 << 20},),
        "30 workers were replaced",
    ),
    "a ring that is too small": (
        run({}, worker(0.1, 5, write=0.09), worker(0.1, 5, write=0.09), oversize=100, ring_needed=1 << 20),
        "ring",
        ({"ring_bytes": 1 << 20},),
        "100 of 100 batches did not fit",
    ),
    "a consumer that hoards": (run({}, worker(0.1, 0.5), worker(0.1, 0.5), ring_copies=80), "ring", (), "hold fewer"),
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
        ({"num_workers": 0},),
        "make batches larger",
    ),
    "a process that takes no batches": (
        run({"transfer": 0.05}, worker(0.01, 0.5), worker(0.01, 0.5)),
        "consumer process",
        ({"prefetch_factor": 4},),
        "50 ms before this process took note",
    ),
    "a stream that most workers have no part of": (
        run({}, worker(0.1, 0.5, BATCHES), worker(0, 0, 0), worker(0, 0, 0), iterable=True),
        "shards",
        (),
        "2 of 3 workers",
    ),
    "one worker that is slow": (
        run({}, worker(0.5, 0.5, 20), worker(0.05, 0.5, 40), worker(0.05, 0.5, 40)),
        "slow worker",
        (),
        "Worker 0 takes 10.0 times",
    ),
    "batches behind one that is slow": (
        run({"order": 0.05}, worker(0.02, 0.5, slow={"fetch": 2.0}), worker(0.02, 0.5, slow={"fetch": 2.0})),
        "fetch",
        ({"num_workers": 4}, {"num_workers": 8}),
        "Finished batches waited 50 ms for an earlier one.",
    ),
    "all CPUs busy": (
        run({}, worker(0.19, 9), worker(0.19, 9), cpus=2, main_cpu_s=0.9),
        "cpus",
        (),
        "All 2 CPUs are busy",
    ),
    "all CPUs busy, half of them with the consumer": (
        run({}, worker(0.3, 3, delayed_s=6), worker(0.3, 3, delayed_s=6), cpus=2, main_cpu_s=13.5),
        "cpus",
        (),
        "torch.set_num_threads",
    ),
    "a dataset that computes, in too few workers": (
        run({}, worker(0.19, 9.4), worker(0.19, 9.4)),
        "compute",
        ({"num_workers": 4}, {"num_workers": 8}),
        "Samples cost computing",
    ),
    "decoding, without workers": (
        run({"fetch": 0.001, "decode": 0.094}, main_cpu_s=9.9, **COMPUTES),
        "compute",
        ({"num_workers": 2}, {"num_workers": 8}),
        "mostly in decode",
    ),
    "a dataset that waits, without workers": (
        run({"fetch": 0.095}, **WAITS),
        "fetch",
        ({"num_workers": 2}, {"num_workers": 8}),
        "Samples cost waiting",
    ),
    "a dataset that waits, in too few workers": (
        run({}, worker(0.19, 0.5), worker(0.19, 0.5), cpus=2),
        "fetch",
        ({"num_workers": 4}, {"num_workers": 8}),
        "workers wait for their reads",
    ),
    "an async dataset with few samples at a time": (
        run({}, worker(0.19, 0.5), asynchronous=True, concurrency=8),
        "fetch",
        ({"concurrency": 32}, {"concurrency": 128}, {"num_workers": 2}),
        "Samples cost waiting",
    ),
    "an async dataset with the default number at a time": (
        run({}, worker(0.19, 0.5), asynchronous=True, concurrency=256, cpus=1),
        "fetch",
        ({"concurrency": 1024}, {"concurrency": 64}),
        "Samples cost waiting",
    ),
    "a stream whose samples are decoded by threads that wait": (
        run(
            {},
            *[[a + b for a, b in zip(worker(0.19, 0.5), block({"decode": 0.18}, BATCHES // 2), strict=True)]] * 2,
            iterable=True,
            asynchronous=True,
            decode_threads=2,
        ),
        "fetch",
        ({"decode_threads": 8},),
        "Another number of workers would alter the order",
    ),
    "a stream that computes": (
        run({}, worker(0.095, 9.4, BATCHES), iterable=True, cpus=4),
        "compute",
        (),
        "Another number of workers would alter the order of the stream's samples.",
    ),
    "a dataset that computes beside other programs": (
        run({}, worker(0.095, 4.7, BATCHES, delayed_s=4.7), cpus=2, main_cpu_s=0.1, others_cpu=1.5),
        "cpus",
        ({"num_workers": 2},),
        "All 2 CPUs are busy, 1.5 of them with other programs: make samples cheaper.",
    ),
    "a control group whose quota is used up": (
        run({}, worker(0.19, 3.5, delayed_s=5), worker(0.19, 3.5, delayed_s=5), cpus=2, cpu_limit=0.7, main_cpu_s=0.1),
        "cpus",
        (),
        "The 0.7 CPUs that the control group's quota allows are used up",
    ),
    "more workers than CPUs": (
        run({}, *[worker(0.6, 4.5, 25, delayed_s=6)] * 4, cpus=2, main_cpu_s=0.1),
        "cpus",
        ({"num_workers": 2},),
        "All 2 CPUs are busy",
    ),
    "tiny batches of workers that are started anew for each epoch": (
        run({}, worker(1e-5, 0.01, starts=10), worker(1e-5, 0.01, starts=10), startup_s=8.0, epochs=10),
        "startup",
        ({"num_workers": 0}, {"persistent_workers": True}),
        "Starting workers took 80%",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_bounds_it_and_what_to_try(name: str) -> None:
    """The verdict names the bottleneck and settings to try; its text has the figures and the options. No gain is
    promised.
    """
    of, bound, tries, words = RUNS[name]
    found = diagnose(of)
    assert (found.bound, found.candidates) == (bound, tries), found
    assert words in found.text
    assert found.text.endswith(".")
    assert "\n" not in found.text
    assert "times as fast" not in found.text
    settings = [f"{option}={value!r}" for each in tries for option, value in each.items()]
    assert f"Worth trying: {'; '.join(settings)}. asyncloader try measures" in found.text or not tries


def test_what_auto_has_tried() -> None:
    """An option that the loader has tried by itself is not to be tried again."""
    of = RUNS["a dataset that waits, in too few workers"][0]
    assert diagnose(of).candidates
    assert diagnose(replace(of, automatic=frozenset({"num_workers"}))).candidates == ()


def of_samples(slow: int = 1, seconds: float = 0.1, **known: Any) -> Diagnosis:
    """The verdict on two workers that wait: of 128 samples each, which take 2 ms, some of one worker take longer."""
    parts = []
    for number in range(2):
        memory = bytearray(SLOW_BYTES)
        took = [seconds if number and item < slow else 0.002 for item in range(128)]
        SlowSamples(memory).note(took, [f"index {128 * number + item}" for item in range(128)].__getitem__, sum(took))
        parts.append(figures(memory))
    return diagnose(run({}, worker(0.19, 0.5), worker(0.19, 0.5), slow=joined(parts), **known))


def test_few_samples_that_take_much_of_the_time_are_named() -> None:
    """With how many they are, their share of all samples' time, and the seconds of the slowest."""
    found = of_samples()
    assert found.bound == "fetch"
    assert " 1 sample of 256 takes 16% of the samples' time: index 128 (0.1 s)." in found.text
    assert found.evidence["slow_samples"] == 1
    assert found.evidence["slow_samples_frac"] == pytest.approx(0.1 / 0.61)
    six = of_samples(6).text
    assert "6 samples of 256 take 55% of the samples' time: index 133 (0.1 s), index 132 (0.1 s), " in six
    assert "index 130 (0.1 s) and others." in six


@pytest.mark.parametrize("how", [{"seconds": 0.02}, {"seconds": 0.005}, {"slow": 60}])
def test_samples_that_matter_little_are_not_named(how: Mapping[str, Any]) -> None:
    """A small share of the time, a little longer than most, or many."""
    assert "sample of" not in (text := of_samples(**how).text)
    assert "samples of" not in text


def test_stalls_for_want_of_cpus_are_not_laid_at_samples() -> None:
    """Where the processes waited for CPUs for longer than the slow samples took."""
    assert "sample of" not in of_samples(delayed_s=1.0).text


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", RUNS)
def test_what_is_to_be_tried_is_an_option(name: str) -> None:
    """`clone` accepts each."""
    of, _, tries, _ = RUNS[name]
    loader = DataLoader[Any](
        Numbers(4), num_workers=of.workers, seed=1, recovery=Recovery(worker_memory_limit=of.memory_limit)
    )
    names = {"snapshot_every_n_steps": "snapshot_every"}
    for change in tries:
        clone = loader.clone(**change)
        assert {option: getattr(EpochConfig.of(clone), names.get(option, option)) for option in change} == change


@pytest.mark.parametrize(
    ("batches", "elapsed", "text"),
    [(0, 0.0, "Nothing was loaded yet."), (3, 9.0, "3 batches in 9.00 s are too few to judge.")],
)
def test_too_little_to_judge(batches: int, elapsed: float, text: str) -> None:
    """The verdict is unknown, without advice."""
    found = diagnose(run({}, batches=batches, elapsed_s=elapsed))
    assert found == Diagnosis("unknown", {}, text)
