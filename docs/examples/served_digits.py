"""Two trainers read from a service of two nodes; one node is killed half-way, and nothing is lost.

    python docs/examples/served_digits.py

1. Two nodes, `asyncloader serve served_digits:digits`, make samples: scikit-learn's digits, turned at random.
2. Two trainers, each with its own seed, train on them at the same time: `workers="tcp://...,tcp://..."`.
3. One node is killed, without warning. The trainers go on with the other one.
4. Each trainer has had the samples that workers of its own would have made: the same bytes, in the same order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import asyncloader
from asyncloader import AsyncDataLoader

BATCH_SIZE = 32
EPOCHS = 12
SEEDS = (2024, 2025)
NODES = 2
HERE = Path(__file__).resolve()


class Digits(Dataset[tuple[int, Tensor, int]]):
    """Images of 8 by 8 pixels from 0 to 1, float32, each turned and shifted at random."""

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.labels = np.asarray(labels)
        self.images = torch.from_numpy(pixels.reshape(-1, 1, 8, 8).astype(np.float32) / 16)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        angle, across, down = ((torch.rand(3) - 0.5) * torch.tensor([0.4, 0.3, 0.3])).tolist()
        turn = torch.tensor([[[np.cos(angle), -np.sin(angle), across], [np.sin(angle), np.cos(angle), down]]])
        grid = nn.functional.affine_grid(turn.float(), [1, 1, 8, 8], align_corners=False)
        image = nn.functional.grid_sample(self.images[index : index + 1], grid, align_corners=False)
        return index, image[0], int(self.labels[index])


@asyncloader.definition
def digits() -> Digits:
    """What the nodes serve."""
    return Digits()


def make_loader(seed: int, workers: str | None) -> AsyncDataLoader[tuple[int, Tensor, int], Any]:
    """The trainers' loader; without `workers`, the one that it is compared with. No worker may need to be replaced."""
    return AsyncDataLoader[Any, Any](
        digits(), BATCH_SIZE, shuffle=True, seed=seed, num_workers=2, max_worker_restarts=0, workers=workers
    )


@cache
def samples() -> int:
    """How many there are."""
    return len(Digits())


# ---------------------------------------------------------------------------------------------- the trainers


async def train(workers: str, seed: int, epochs: int) -> None:
    """Train a small network. Each batch, and each line of the log, is told of by a line of JSON on standard output."""
    logging.getLogger("asyncloader").addHandler(Told())
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    def step(images: Tensor, labels: Tensor) -> float:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    async with make_loader(seed, workers) as loader:
        batches = 0
        for _ in range(epochs):
            async for indices, images, labels in loader:
                loss = await asyncio.to_thread(step, images, labels)
                batches += 1
                told = {"batches": batches, "loss": loss, "indices": indices.tolist(), "crc": checksum(images)}
                print(json.dumps(told), flush=True)


class Told(logging.Handler):
    """Tells who started this process what the loader logs."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        print(json.dumps({"log": record.getMessage()}), flush=True)


def checksum(images: Tensor) -> int:
    """Of a batch's bytes."""
    return zlib.crc32(images.numpy().tobytes())


# ------------------------------------------------------------------------------------------------- the screen


class Screen:
    """A line for each trainer; not on a terminal: a line for each epoch of each.

    Args:
        total: batches of a trainer.
        epochs: of a trainer.
    """

    def __init__(self, total: int, epochs: int) -> None:
        self.total = total
        self.every = total // epochs
        self.live = sys.stdout.isatty()
        self.lines = [""] * len(SEEDS)
        self.drawn = False

    def show(self, trainer: int, batches: int, loss: float) -> None:
        """Draw a trainer's line."""
        bar = "#" * (32 * batches // self.total)
        line = f"  trainer {trainer + 1} [{bar:<32}] {batches:3}/{self.total} batches, loss {loss:.3f}"
        self.lines[trainer] = line
        if self.live:
            up = f"\x1b[{len(SEEDS)}A" if self.drawn else ""
            print(up + "".join(f"\x1b[2K{each}\n" for each in self.lines), end="", flush=True)
            self.drawn = True
        elif batches % self.every == 0:
            print(line, flush=True)

    def say(self, text: str) -> None:
        """Print a line between the others."""
        print(text, flush=True)
        self.drawn = False


# ----------------------------------------------------------------------------------------------- all together


@asynccontextmanager
async def started(*arguments: str, stderr: IO[str] | None = None) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A Python program, killed at the end if it still runs."""
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def told_by(process: asyncio.subprocess.Process) -> AsyncGenerator[dict[str, Any]]:
    """The lines of JSON that a program prints."""
    assert process.stdout is not None
    async for line in process.stdout:
        yield json.loads(line)


async def run(epochs: int) -> bool:
    """Run the example; whether all is as it should be."""
    per_epoch = -(-samples() // BATCH_SIZE)
    screen = Screen(per_epoch * epochs, epochs)
    kill_at = epochs // 2 * per_epoch + per_epoch // 2  # in the middle of an epoch
    got: list[list[tuple[list[int], int]]] = [[] for _ in SEEDS]
    async with AsyncExitStack() as stack:
        serve = ["-m", "asyncloader", "serve", "served_digits:digits", "--listen", "127.0.0.1:0", "--workers", "1"]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        nodes = [await stack.enter_async_context(started(*serve, stderr=log)) for _ in range(NODES)]
        try:
            addresses = [(await anext(told_by(node)))["listening"] for node in nodes]
        except StopAsyncIteration:
            log.seek(0)
            raise SystemExit(f"a node could not start: {log.read()}") from None
        screen.say(f"{samples():,} digits at {' and '.join(addresses)}\n")

        async def follow(trainer: int, seed: int) -> None:
            train = [str(HERE), "--epochs", str(epochs), "--train", ",".join(addresses), str(seed)]
            process = await stack.enter_async_context(started(*train))
            async for told in told_by(process):
                if "log" in told:
                    screen.say(f"  trainer {trainer + 1}: {told['log']}")
                    continue
                got[trainer].append((told["indices"], told["crc"]))
                screen.show(trainer, told["batches"], told["loss"])
                if trainer == 0 and told["batches"] == kill_at:
                    nodes[0].kill()  # SIGKILL: nothing is handed over, nothing is closed
                    screen.say(f"{addresses[0]} is killed")
            if await process.wait():
                raise SystemExit(f"trainer {trainer + 1} ended with {process.returncode}")

        async with asyncio.TaskGroup() as group:
            for trainer, seed in enumerate(SEEDS):
                group.create_task(follow(trainer, seed))
    facts = {"the first node is dead": nodes[0].returncode == -9}
    for trainer, seed in enumerate(SEEDS):
        facts |= await compared(f"trainer {trainer + 1}", got[trainer], seed, epochs)
    print()
    for fact, holds in facts.items():
        print(f"  {'yes' if holds else 'NO '}  {fact}")
    return all(facts.values())


async def compared(name: str, got: list[tuple[list[int], int]], seed: int, epochs: int) -> dict[str, bool]:
    """Compare what a trainer had with what workers of its own make."""
    async with make_loader(seed, None) as loader:
        expected = [(indices.tolist(), checksum(images)) for _ in range(epochs) async for indices, images, _ in loader]
    per_epoch = len(expected) // epochs
    parts = [got[start : start + per_epoch] for start in range(0, len(got), per_epoch)]
    once = len(parts) == epochs and all(
        sorted(index for indices, _ in part for index in indices) == list(range(samples())) for part in parts
    )
    mine, theirs = (zlib.crc32(json.dumps(each).encode()) for each in (got, expected))
    return {
        f"{name}: each of the {samples():,} samples came once in every epoch": once,
        f"{name}: bytes and order as from workers of its own: {mine:08x} and {theirs:08x}": mine == theirs,
    }


def main() -> int:
    """Read the command line, and run the whole example or one trainer; the exit status."""
    parser = argparse.ArgumentParser(description="Two trainers read from two nodes, one of which is killed.")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # it writes nothing
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="(%(default)s)")
    parser.add_argument("--train", nargs=2, metavar=("WORKERS", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        asyncio.run(train(options.train[0], int(options.train[1]), options.epochs))
        return 0
    return 0 if asyncio.run(run(options.epochs)) else 1


if __name__ == "__main__":
    sys.exit(main())
