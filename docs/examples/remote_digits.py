"""Train from a store that is 30 ms away, be killed half-way, and go on as if nothing had happened.

    python docs/examples/remote_digits.py

1. scikit-learn's digits are written as tar files, and a local store serves them late (`slow_store.py`).
2. A process trains on them: `RemoteIterableDataset` in an `AsyncDataLoader`. It saves its state every few batches.
3. The same again, but the process is killed half-way, without warning, and a new one goes on from the last state, with
   another number of workers.
4. Both runs have trained on each sample once in every epoch, in the same order, and end with the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import math
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

from asyncloader import AsyncDataLoader, RemoteIterableDataset

SIDE = 16  # pixels
BATCH_SIZE = 64
EPOCHS = 12
WORKERS = 2
WORKERS_LATER = 1  # after the kill
STREAMS = 4  # with them the batches do not depend on the number of workers
SHARDS = 8
LATENCY_MS = 30
SAVE_EVERY = 10  # batches
SEED = 2024
WANTED_ACCURACY = 0.95
FOLDER = Path(__file__).resolve().parents[2] / "build" / "remote-digits"
STORE = Path(__file__).with_name("slow_store.py")

Batch = tuple[Tensor, Tensor, Tensor]  # float32 images (n, 1, SIDE, SIDE), int64 labels (n,), int64 keys (n,)
Step = Callable[[Tensor, Tensor], float]


# ------------------------------------------------------------------------------------------------ the shards


@cache
def digits() -> tuple[Any, Any]:
    """scikit-learn's digits: (1797, 64) pixels from 0 to 16, and (1797,) labels."""
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def split() -> tuple[list[int], list[int]]:
    """The numbers of the digits to train on and of those to test with: every fifth."""
    numbers = range(len(digits()[1]))
    return [number for number in numbers if number % 5], [number for number in numbers if not number % 5]


def picture(number: int) -> Image.Image:
    """Digit `number`, SIDE pixels wide."""
    image = Image.fromarray((digits()[0][number].reshape(8, 8) * 255 / 16).astype(np.uint8))
    return image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def write_shards(folder: Path) -> None:
    """Write the digits to folder/train-0.tar and so on, as WebDataset does: 00017.png and 00017.cls are a sample."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    labels = digits()[1]
    numbers = split()[0]
    for shard in range(SHARDS):
        with tarfile.open(unfinished / f"train-{shard}.tar", "w") as tar:
            for number in numbers[shard::SHARDS]:
                png = io.BytesIO()
                picture(number).save(png, "png")
                for extension, data in (("png", png.getvalue()), ("cls", str(labels[number]).encode())):
                    member = tarfile.TarInfo(f"{number:05}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    unfinished.rename(folder)


@contextmanager
def running_store(folder: Path) -> Generator[str]:
    """Run the store in a process of its own; gives its URL."""
    command = [sys.executable, str(STORE), str(folder), str(LATENCY_MS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


# ---------------------------------------------------------------------------------------------- the training


def decode(sample: dict[str, Any]) -> tuple[Tensor, int, int]:
    """From the bytes of a sample to an image, its label and its number. Runs in a thread of a worker."""
    image = np.asarray(Image.open(io.BytesIO(sample["png"])), dtype=np.float32) / 255
    return torch.from_numpy(image).unsqueeze(0), int(sample["cls"]), int(sample["__key__"])


def make_network() -> nn.Module:
    """Two convolutions and one linear layer: 15 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 4) ** 2, 10),
    )


def make_step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the function that does one training step and gives its loss."""

    def step(images: Tensor, labels: Tensor) -> float:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


async def train(store: str, state_file: Path, saved: dict[str, Any] | None, epochs: int, workers: int) -> None:
    """Train from the state `saved` on, if there is one. Each batch is told of by a line of JSON on standard output."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    step = make_step(network, optimizer)
    seen: list[list[int]] = []  # for each epoch the keys of the samples, in the order of the training

    urls = f"{store}/train-{{0..{SHARDS - 1}}}.tar"
    dataset = RemoteIterableDataset(urls, shuffle_buffer=256, streams=STREAMS)
    async with AsyncDataLoader[Batch](
        dataset, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=True, seed=SEED, decode=decode
    ) as loader:
        batches = 0
        if saved is not None:
            network.load_state_dict(saved["network"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            seen, batches = saved["seen"], saved["batches"]
        tell(resumed=batches)

        def save() -> None:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
                "seen": seen,
                "batches": batches,
            }
            unfinished = state_file.with_suffix(".new")
            torch.save(state, unfinished)
            unfinished.replace(state_file)  # whoever is killed leaves the old one or the new one

        for epoch in range(max(len(seen) - 1, 0), epochs):
            if epoch == len(seen):
                seen.append([])
            async for images, labels, keys in loader:
                loss = await asyncio.to_thread(step, images, labels)  # the loop stays free for the loader
                seen[epoch] += keys.tolist()
                batches += 1
                if batches % SAVE_EVERY == 0:
                    save()
                tell(epoch=epoch, batches=batches, loss=loss)
        save()


def tell(**values: float) -> None:
    """Tell whoever started this process."""
    print(json.dumps(values), flush=True)


# ------------------------------------------------------------------------------------------- the two runs


class Bar:
    """A progress bar on a terminal; elsewhere one line an epoch.

    Args:
        total: batches.
        epochs: of the run.
    """

    def __init__(self, total: int, epochs: int) -> None:
        self.total = total
        self.epochs = epochs
        self.live = sys.stdout.isatty()

    def show(self, epoch: int, batches: int, loss: float) -> None:
        """Draw it."""
        bar = "#" * (32 * batches // self.total)
        line = f"  epoch {epoch + 1:2}/{self.epochs} [{bar:<32}] {batches:3}/{self.total} batches, loss {loss:.3f}"
        last = batches == self.total
        if self.live:
            print(f"\r{line}", end="\n" if last else "", flush=True)
        elif last or batches % (self.total // self.epochs) == 0:
            print(line, flush=True)

    def interrupt(self) -> None:
        """The next text begins on a line of its own."""
        if self.live:
            print()


def run_training(store: str, state_file: Path, bar: Bar, workers: int, kill_at: int | None = None) -> int:
    """Train in a process of its own, which is killed after so many batches; gives the batches it began with."""
    command = [sys.executable, __file__, "--train", store, str(state_file), "--epochs", str(bar.epochs)]
    command += ["--workers", str(workers)]
    resumed = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                told = json.loads(line)
                resumed = told.pop("resumed", resumed)
                if told:
                    bar.show(**told)
                if kill_at is not None and told.get("batches") == kill_at:
                    process.kill()  # SIGKILL: nothing is saved, nothing is closed
                    break
        except BaseException:
            process.kill()
            raise
    if kill_at is None and process.returncode:
        raise SystemExit(f"the training ended with {process.returncode}")
    return resumed


def digest(state: dict[str, Any]) -> str:
    """A digest of all keys, in the order of the training."""
    return hashlib.sha256(json.dumps(state["seen"]).encode()).hexdigest()[:16]


def accuracy(state: dict[str, Any]) -> float:
    """The share of the test digits that the trained network names rightly."""
    network = make_network()
    network.load_state_dict(state["network"])
    numbers = split()[1]
    images = np.stack([np.asarray(picture(number), dtype=np.float32) / 255 for number in numbers])
    with torch.inference_mode():
        named = network(torch.from_numpy(images).unsqueeze(1)).argmax(1).numpy()
    return float((named == digits()[1][numbers]).mean())


def compare(whole: dict[str, Any], killed: dict[str, Any], epochs: int) -> bool:
    """Print what the two runs have in common; whether all is as it should be."""
    wanted = split()[0]

    def once(state: dict[str, Any]) -> bool:
        return len(state["seen"]) == epochs and all(sorted(epoch) == wanted for epoch in state["seen"])

    same_weights = all(torch.equal(whole["network"][name], killed["network"][name]) for name in whole["network"])
    reached = accuracy(killed)
    facts = {
        f"each of the {len(wanted):,} samples came once in every epoch, uninterrupted": once(whole),
        f"each of the {len(wanted):,} samples came once in every epoch, killed and resumed": once(killed),
        f"the same order: digests of the keys {digest(whole)} and {digest(killed)}": digest(whole) == digest(killed),
        "the same weights at the end, to the bit": same_weights,
    }
    if epochs >= EPOCHS:
        facts[f"test accuracy {reached:.1%} (wanted: above {WANTED_ACCURACY:.0%})"] = reached > WANTED_ACCURACY
    for fact, holds in facts.items():
        print(f"  {'yes' if holds else 'NO '}  {fact}")
    return all(facts.values())


def show_and_compare(folder: Path, epochs: int) -> int:
    """Run the example; the exit status."""
    write_shards(folder)
    samples = len(split()[0])
    per_epoch = math.ceil(samples / BATCH_SIZE)
    bar = Bar(per_epoch * epochs, epochs)
    kill_at = bar.total // 2 + SAVE_EVERY // 2  # in the middle of an epoch, and not just after a state was saved
    kill_at -= kill_at % SAVE_EVERY == 0
    with running_store(folder) as store, tempfile.TemporaryDirectory() as states:
        whole, killed = Path(states, "whole.pt"), Path(states, "killed.pt")
        print(f"{samples:,} digits in {SHARDS} tar files, behind {LATENCY_MS} ms at {store}\n")

        print("training without interruption")
        began = time.perf_counter()
        run_training(store, whole, bar, WORKERS)
        print(f"  took {time.perf_counter() - began:.1f} s, with the start of all processes\n")

        print(f"the same, killed after {kill_at} batches")
        run_training(store, killed, bar, WORKERS, kill_at)
        bar.interrupt()
        print(f"killed. A new process goes on, with {WORKERS_LATER} worker instead of {WORKERS}")
        resumed = run_training(store, killed, bar, WORKERS_LATER)
        print(f"  it went on from batch {resumed}; the {kill_at - resumed} after it were trained again\n")

        return 0 if compare(read_state(whole), read_state(killed), epochs) else 1


def read_state(file: Path) -> dict[str, Any]:
    """What a run saved last."""
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def new_runner() -> asyncio.Runner:
    """Return a runner on uvloop, or on asyncio's own loop where there is no uvloop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def main() -> int:
    """Read the command line, and run the whole example or one training; the exit status."""
    parser = argparse.ArgumentParser(description="Train from a slow store, be killed, and go on.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the tar files (%(default)s)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="(%(default)s)")
    parser.add_argument("--train", nargs=2, metavar=("STORE", "STATE"), help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is None:
        return show_and_compare(options.folder, options.epochs)
    with new_runner() as runner:
        store, state_file = options.train[0], Path(options.train[1])
        saved = read_state(state_file) if state_file.exists() else None
        runner.run(train(store, state_file, saved, options.epochs, options.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
