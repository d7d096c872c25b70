from __future__ import annotations

import multiprocessing
from importlib import import_module
from typing import Any

import pytest
import torch

import asyncloader
from tests.clients.frameworks.helping import Rows, RowStream, batches_given, seed_all
from tests.helpers.comparing import assert_same

pytestmark = pytest.mark.clients

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader


class _Four:
    """The methods of an environment of four rows: each starts from the row that it is given, and keeps it."""

    def _reset(self, data: Any, **_: Any) -> Any:
        return data.select("x", "labels").set("turn", torch.zeros(4, 1))

    def _step(self, data: Any) -> Any:
        done = torch.zeros(4, 1, dtype=torch.bool)
        ends = {"reward": torch.zeros(4, 1), "done": done, "terminated": done, "turn": data["turn"] + 1}
        return data.select("x", "labels").update(ends)

    def _set_seed(self, seed: int | None) -> None: ...


class TorchRL:
    """Makes an environment that is fed from a loader."""

    def __init__(self) -> None:
        method = multiprocessing.get_start_method(allow_none=True)
        self.envs: Any = import_module("torchrl.envs")
        multiprocessing.set_start_method(method, force=True)  # TorchRL makes it "spawn", for the whole process
        self.primer: Any = import_module("torchrl.envs.llm.transforms").DataLoadingPrimer
        self.specs: Any = import_module("torchrl.data")
        self.four: Any = type("Four", (_Four, self.envs.EnvBase), {})

    def fed(self, loader: Any) -> Any:
        """Return the environment with the loader's primer."""
        env = self.four(batch_size=[4])
        env.observation_spec = self.specs.Composite(turn=self.specs.Unbounded((4, 1)), shape=[4])
        env.action_spec = self.specs.Binary(n=1, shape=[4, 1])
        env.reward_spec = self.specs.Unbounded((4, 1))
        primer = self.primer(dataloader=loader, batch_size=[4], stack_method=torch.stack)
        return self.envs.TransformedEnv(env, primer)


@pytest.fixture(scope="module")
def torchrl() -> TorchRL:
    return TorchRL()


def given(env: Any, resets: int) -> list[dict[str, torch.Tensor]]:
    """Reset the environment several times. Returns the rows with which it started each time."""
    started = [env.reset() for _ in range(resets)]
    return [{"x": data["x"].clone(), "labels": data["labels"].clone()} for data in started]


@pytest.mark.parametrize("dataset", [Rows(20), RowStream(20)], ids=["map", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_primer_reads_our_loader(torchrl: TorchRL, dataset: Any, num_workers: int) -> None:
    """Each reset takes the next rows, epoch after epoch without an end: torch's rows."""
    loader: Any = None
    runs = []
    for make in (STOCK, OURS):
        seed_all()
        loader = make(dataset, batch_size=8, num_workers=num_workers)
        env = torchrl.fed(loader)
        runs.append(given(env, resets=13))
        env.transform.reset_dataloader()  # collected with the environment, torch's workers take 10 s to end
    assert runs[1][0]["x"].shape == (4, 3)
    assert_same(runs[1], runs[0])
    assert batches_given(loader) >= 13 * 4 // 8


def test_rollout(torchrl: TorchRL) -> None:
    """A rollout carries the rows of its reset through all its steps."""
    env = torchrl.fed(OURS(Rows(20), batch_size=4, num_workers=1))
    rollout = env.rollout(3)
    assert rollout["x"].shape == (4, 3, 3)
    assert torch.equal(rollout["x"][:, 0], rollout["x"][:, 2])


def test_chat_environment_from_our_loader(torchrl: TorchRL) -> None:
    """`ChatEnv.from_dataloader` asks the questions of our loader's batches, in their order."""
    chat = import_module("torchrl.envs.llm").ChatEnv
    questions = [{"query": f"question {i}"} for i in range(6)]
    with import_module("tensordict").set_list_to_stack(True):
        loader = OURS(questions, batch_size=2, num_workers=1)
        env = chat.from_dataloader(loader, batch_size=(2,), input_mode="history")
        asked = [env.reset()["history"].prompt.content for _ in range(3)]
    assert asked == [[[f"question {2 * i}"], [f"question {2 * i + 1}"]] for i in range(3)]
