"""`RayWorkers` beside Ray Data, in one Ray cluster of three machines, which are child processes.

    python -m tests.benchmarks.ray_cluster

Both read the same array, in batches of 1 MiB, with two CPUs for the workers: samples as they are, and samples that take
5 ms a batch to make. The sum of each epoch is checked. Then a machine is killed in mid-epoch: what is lost or doubled,
and the longest wait.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil
import ray
import ray.data
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

import asyncloader
from asyncloader.integrations.ray import RayWorkers
from tests.helpers.running import ROOT

__all__: list[str] = []

SAMPLES, WIDTH, BATCH = 16_384, 4096, 64  # of float32: 1 MiB a batch, 256 MiB an epoch
ROUNDS = 5
SLOW_S = 0.005


class Rows(Dataset[Any]):
    """Rows of numbers; `seconds` for each batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.seconds)
        return [torch.full((WIDTH,), float(index)) for index in indices]

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("whole batches are asked for")


@contextmanager
def cluster() -> Generator[Cluster]:
    """The trainer's machine, and two for the workers."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, resources={"loading": 1})
        ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def with_workers(workers: RayWorkers, seconds: float) -> Callable[[], Iterator[torch.Tensor]]:
    """Epochs of a loader."""
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 1, "num_workers": 2, "persistent_workers": True}
    loader = asyncloader.DataLoader[Any](Rows(seconds), workers=workers, **options)
    return lambda: iter(loader)


def with_ray_data(seconds: float) -> Callable[[], Iterator[torch.Tensor]]:
    """Epochs of Ray Data's iterator for one trainer."""

    def rows(batch: Any) -> Any:
        time.sleep(seconds)
        return {"row": np.repeat(batch["id"].astype(np.float32)[:, None], WIDTH, axis=1)}

    data = ray.data.range(SAMPLES).map_batches(rows, batch_size=BATCH)
    (split,) = data.streaming_split(1)
    return lambda: (batch["row"] for batch in split.iter_torch_batches(batch_size=BATCH, prefetch_batches=4))


def epoch(start: Callable[[], Iterator[torch.Tensor]]) -> tuple[float, float, list[int]]:
    """Batches per second from the first batch on, the longest wait, and the rows that came."""
    rows: list[int] = []
    batches = start()
    rows += next(batches)[:, 0].long().tolist()
    began = before = time.perf_counter()
    count, longest = 0, 0.0
    for batch in batches:
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
        rows += batch[:, 0].long().tolist()
        count += 1
    return count / (time.perf_counter() - began), longest, rows


def killed(made: Cluster, start: Callable[[], Iterator[torch.Tensor]]) -> tuple[float, list[int]]:
    """The longest wait, and the rows, of an epoch in which a machine is killed after 40 batches."""
    rows: list[int] = []
    longest, before = 0.0, 0.0
    for number, batch in enumerate(start()):
        now = time.perf_counter()
        longest, before = max(longest, now - before if number else 0.0), now
        rows += batch[:, 0].long().tolist()
        if number == 40:
            machines: Any = made
            victim = psutil.Process(machines.list_all_nodes()[-1].all_processes["raylet"][0].process.pid)
            for process in [*reversed(victim.children(recursive=True)), victim]:
                with suppress(psutil.NoSuchProcess):
                    os.kill(process.pid, signal.SIGKILL)
            before = time.perf_counter()
    return longest, rows


def account(rows: list[int]) -> str:
    """How many are missing, and how many came twice."""
    return f"{SAMPLES - len(set(rows))} lost, {len(rows) - len(set(rows))} doubled"


def main() -> None:
    """Measure, and print."""
    for seconds in (0.0, SLOW_S):
        with cluster():
            kinds = {
                "RayWorkers": with_workers(RayWorkers(2, cpus_per_node=1, resources={"loading": 1}), seconds),
                "Ray Data": with_ray_data(seconds),
            }
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for round_number in range(ROUNDS + 1):
                for kind, start in kinds.items():
                    rate, _, rows = epoch(start)
                    assert sorted(rows) == list(range(SAMPLES)), f"{kind}: {account(rows)}"
                    if round_number:
                        rates[kind].append(rate)
            for kind, found in rates.items():
                print(f"{seconds * 1e3:g} ms a batch, {kind}: {statistics.median(found):.0f} batches/s {found}")
    for kind in ("RayWorkers", "Ray Data"):
        with cluster() as made:
            if kind == "RayWorkers":
                start = with_workers(RayWorkers(2, cpus_per_node=1, resources={"loading": 1}), SLOW_S)
            else:
                start = with_ray_data(SLOW_S)
            assert account(epoch(start)[2]) == account(list(range(SAMPLES)))  # until all of them have started
            longest, rows = killed(made, start)
            print(f"a machine killed, {kind}: {account(rows)}; longest wait {longest:.2f} s")


if __name__ == "__main__":
    main()
