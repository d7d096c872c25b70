"""A training job of Ray Train whose ranks come and go, with its loaders' workers in the same cluster."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
import torch

from asyncloader import DataLoader
from asyncloader.integrations.ray import RayWorkers
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S, ROOT
from tests.ray_cluster.datasets import Noise

pytest.importorskip("ray.train")

from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

STEPS, BATCH = 24, 4
STAGES = [(2, 8), (1, 16), (2, STEPS)]  # number of ranks, and the step until which they train
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 2}


class Referee:
    """Records the batches of the ranks, and stops the ranks of each stage after its last step."""

    def __init__(self) -> None:
        self._stage = 0
        self._stopped = asyncio.Event()
        self._read: dict[int, tuple[int, dict[int, Any]]] = {}

    async def step(self, ranks: int, rank: int, step: int, batch: Any) -> None:
        """Record a rank's batch before it trains on it. Never returns if the rank should not train."""
        allowed, end = STAGES[self._stage]
        if ranks != allowed or step >= end:
            if ranks == allowed:
                self._stopped.set()
            await asyncio.Event().wait()
        if self._read.get(step, (0, {}))[0] != ranks:
            self._read[step] = ranks, {}
        self._read[step][1][rank] = batch

    async def stopped(self) -> None:
        """Wait until the ranks of this stage have stopped, and begin the next stage."""
        await self._stopped.wait()
        self._stopped.clear()
        self._stage += 1

    async def read(self) -> list[list[Any]]:
        """Return the ranks' batches of each step, as of the last time that the step was trained."""
        return [[batches[rank] for rank in range(ranks)] for _, (ranks, batches) in sorted(self._read.items())]


def train(config: dict[str, Any]) -> None:
    """Train a rank, which saves a checkpoint after each step."""
    ranks, rank = get_context().get_world_size(), get_context().get_world_rank()
    with DataLoader[Any](Noise(STEPS * BATCH, (2,)), BATCH // ranks, workers=config["workers"], **OPTIONS) as loader:
        begin, checkpoint = 0, get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder) / "state.pt")
            loader.load_state_dict(saved["loader"])
            begin = saved["step"]
        for step, batch in enumerate(loader, begin):
            ray.get(config["referee"].step.remote(ranks, rank, step, batch))
            with TemporaryDirectory() as folder:
                torch.save({"loader": loader.state_dict(), "step": step + 1}, Path(folder) / "state.pt")
                report({}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def fit(config: dict[str, Any], path: str) -> None:
    """Run the job with one or two ranks, for which the cluster has machines."""
    scaling: dict[str, Any] = {
        "num_workers": (1, 2),
        "resources_per_worker": {"CPU": 1, "rank": 1},
        "elastic_resize_monitor_interval_s": 1,
    }
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(storage_path=path, failure_config=FailureConfig(max_failures=3)),
    ).fit()


@pytest.mark.timeout(300)
def test_ranks_that_go_and_come(cluster: Any, tmp_path: Path) -> None:
    """Two ranks, then one after the loss of a machine, then two again: joined in rank order, their batches are those of
    a single undisturbed loader.
    """
    machines = [cluster.add_node(num_cpus=1, resources={"rank": 1}) for _ in range(2)]
    # On this machine: one of the others is removed.
    here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(Referee)
    referee = actor.remote()
    # Ray Train notices a lost machine after up to 20 s, and until then tries to start ranks on it.
    soon = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5", "PYTHONPATH": str(ROOT)}
    task: Any = ray.remote(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": soon})(fit)
    training = task.remote({"workers": RayWorkers(2, cpus_per_node=1), "referee": referee}, str(tmp_path))
    try:
        ray.get(referee.stopped.remote(), timeout=4 * PATIENCE_S)
        cluster.remove_node(machines.pop())
        ray.get(referee.stopped.remote(), timeout=4 * PATIENCE_S)
        machines.append(cluster.add_node(num_cpus=1, resources={"rank": 1}))
        ray.get(training, timeout=4 * PATIENCE_S)
        steps = ray.get(referee.read.remote())
    finally:
        for machine in machines:
            cluster.remove_node(machine)
    assert [ranks for ranks, _ in groupby(len(step) for step in steps)] == [2, 1, 2]
    with DataLoader[Any](Noise(STEPS * BATCH, (2,)), BATCH, **OPTIONS) as undisturbed:
        joined = [[torch.cat(parts) for parts in zip(*step, strict=True)] for step in steps]
        assert_same(joined, list(undisturbed))
