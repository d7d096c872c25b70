"""Train a small network on handwritten digits, read from PNG files by an async dataset in two workers.

    python docs/examples/digits.py

1. scikit-learn's digits are written as PNG files, once.
2. `Digits` reads, decodes and augments them: its `__getitem__` is a coroutine.
3. `train` iterates an `AsyncDataLoader` with `async for`.
4. The same files then go through the sync facade `DataLoader` and through torch's own DataLoader: from this disk, and
   as if each read came from a store that answers after 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

from asyncloader import AsyncDataLoader, DataLoader, Dataset
from asyncloader.transports import LocalTransport

SIDE = 32  # pixels
BATCH_SIZE = 64
EPOCHS = 15
WORKERS = 2
WANTED_ACCURACY = 0.95
LATENCY_S = 0.010  # of the store in the comparison
CACHE = Path(__file__).resolve().parents[2] / "build" / "digits"

Batch = tuple[Tensor, Tensor]  # float32 images (n, 1, SIDE, SIDE), int64 labels (n,)
Step = Callable[[Tensor, Tensor], None]


# ----------------------------------------------------------------------------------------------- the dataset


def write_digits(folder: Path) -> None:
    """Write the digits to folder/train and folder/test as <number>-<label>.png, unless they are there."""
    if folder.exists():
        return
    images, labels = load_digits(return_X_y=True)  # (1797, 64) from 0 to 16, (1797,)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        part = unfinished / ("test" if number % 5 == 0 else "train")
        part.mkdir(exist_ok=True)
        image = Image.fromarray((pixels.reshape(8, 8) * 255 / 16).astype(np.uint8))
        image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(part / f"{number:04}-{label}.png")
    unfinished.rename(folder)


def decode(png: bytes, angle: float, shift: tuple[int, int]) -> Tensor:
    """Return a float32 tensor of shape (1, SIDE, SIDE): the image turned by `angle` degrees, then shifted."""
    image: Image.Image = Image.open(io.BytesIO(png))
    if angle or any(shift):
        image = image.rotate(angle, Image.Resampling.BILINEAR, translate=shift)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).unsqueeze(0)


def draw(augment: bool) -> tuple[float, tuple[int, int]]:
    """Draw a turn and a shift from torch's generator, which the loader seeds in each worker."""
    if not augment:
        return 0.0, (0, 0)
    angle, right, down = (torch.rand(3) * 2 - 1).tolist()
    return angle * 12, (round(right * 2), round(down * 2))


class DigitFiles(Dataset[Any]):
    """The PNG files of one folder; the label is in the name."""

    def __init__(self, folder: Path, *, augment: bool = False, latency_s: float = 0.0, most: int | None = None) -> None:
        self.folder = folder
        self.paths = sorted(folder.glob("*.png"))[:most]
        self.augment = augment
        self.latency_s = latency_s

    def __len__(self) -> int:
        return len(self.paths)


class Digits(DigitFiles):
    """What the workers read: the coroutines of many samples run at once."""

    async def __aenter__(self) -> None:  # each worker enters its copy
        self.files = LocalTransport(self.folder)

    async def __aexit__(self, *_: object) -> None:
        await self.files.aclose()

    async def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        how = draw(self.augment)  # before the first await, so that the draws come in the order of the samples
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        png = await self.files.read(path.name)
        return decode(png, *how), int(path.stem[-1])


class BlockingDigits(DigitFiles):
    """The synchronous twin, for torch's DataLoader: the same samples, one after the other."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        how = draw(self.augment)
        if self.latency_s:
            time.sleep(self.latency_s)
        return decode(path.read_bytes(), *how), int(path.stem[-1])


# ---------------------------------------------------------------------------------------------- the training


def make_network() -> nn.Module:
    """Three convolutions and one linear layer: 25 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (SIDE // 8) ** 2, 10),
    )


def make_step(network: nn.Module) -> Step:
    """Return the function that does one training step."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


async def train(loader: AsyncDataLoader[Batch], step: Step) -> None:
    """Train for EPOCHS epochs. The step runs in a thread, so the event loop stays free for other work."""
    batches = math.ceil(len(loader.dataset) / BATCH_SIZE)
    for epoch in range(EPOCHS):
        done = 0
        async for images, labels in loader:
            await asyncio.to_thread(step, images, labels)
            done += 1
            show_progress(epoch, done, batches)


async def accuracy(network: nn.Module, loader: AsyncDataLoader[Batch]) -> float:
    """Return the share of the loader's samples that the network names rightly."""
    right = total = 0
    with torch.inference_mode():
        async for images, labels in loader:
            right += int((network(images).argmax(1) == labels).sum())
            total += len(labels)
    return right / total


def show_progress(epoch: int, done: int, batches: int) -> None:
    """A bar on a terminal; elsewhere one line an epoch."""
    bar = "#" * (24 * done // batches)
    line = f"epoch {epoch + 1}/{EPOCHS} [{bar:<24}] {done:3}/{batches} batches"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if done == batches else "", flush=True)
    elif done == batches:
        print(line, flush=True)


# -------------------------------------------------------------------------------------------- the comparison


async def async_rate(loader: AsyncDataLoader[Batch]) -> float:
    """Return samples a second through one epoch of `async for`, in which nothing is done with them."""
    samples, begin = 0, time.perf_counter()
    async for _, labels in loader:
        samples += len(labels)
    return samples / (time.perf_counter() - begin)


def sync_rate(loader: torch.utils.data.DataLoader[Batch]) -> float:
    """Return samples a second through one epoch of `for`."""
    samples, begin = 0, time.perf_counter()
    for _, labels in loader:
        samples += len(labels)
    return samples / (time.perf_counter() - begin)


def rates(train_set: Path, latency_s: float, most: int | None) -> dict[str, float]:
    """Return each loader's samples a second: the median of three epochs, with two workers that run already."""
    given: dict[str, Any] = {"augment": True, "latency_s": latency_s, "most": most}
    dataset, twin = Digits(train_set, **given), BlockingDigits(train_set, **given)
    options: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "shuffle": True,
        "num_workers": WORKERS,
        "persistent_workers": True,
    }

    def median(rate: Callable[[], float]) -> float:
        rate()  # starts the workers
        return statistics.median(rate() for _ in range(3))

    found = {}
    with new_runner() as runner, AsyncDataLoader[Batch](dataset, **options) as loader:
        found["asyncloader, async dataset, async for"] = median(lambda: runner.run(async_rate(loader)))
    with DataLoader[Batch](dataset, **options) as facade:
        found["asyncloader, async dataset, for"] = median(lambda: sync_rate(facade))
    with DataLoader[Batch](twin, **options) as facade:
        found["asyncloader, blocking dataset, for"] = median(lambda: sync_rate(facade))
    stock: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(twin, **options)
    found["torch, blocking dataset, for"] = median(lambda: sync_rate(stock))
    return found


def compare(train_set: Path) -> None:
    """Print the rates of the loaders over the same files, near and far away."""
    near = rates(train_set, 0.0, None)
    far = rates(train_set, LATENCY_S, 4 * BATCH_SIZE)
    print(f"\nsamples/s, {WORKERS} workers, batches of {BATCH_SIZE}         from this disk", end="")
    print(f"    {LATENCY_S * 1e3:.0f} ms away")
    for name, rate in near.items():
        print(f"  {name:<38} {rate:16,.0f} {far[name]:13,.0f}")
    ours, *_, torchs = far.values()
    print(f"Far away the async dataset is {ours / torchs:.0f} times as fast: its workers have many reads in flight.")


def print_stages(stats: dict[str, float]) -> None:
    """Print where a batch's time went, and what of it the training waited for."""
    print("\nwhere a batch's time went       median         95 % are below")
    for key, median_s in stats.items():
        if key.startswith("stage/") and key.endswith("/p50_s"):
            stage = key.split("/")[1]
            print(f"  {stage:<20} {median_s * 1e3:14.2f} ms {stats[f'stage/{stage}/p95_s'] * 1e3:17.2f} ms")
    print(f"  the training waited for data {stats['data/wait_frac']:.0%} of the time")


# --------------------------------------------------------------------------------------------------- the run


def new_runner() -> asyncio.Runner:
    """Return a runner on uvloop, or on asyncio's own loop where there is no uvloop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def train_and_test(folder: Path, network: nn.Module, step: Step) -> float:
    """Train, print what the loader says about the run, and return the accuracy on the test digits."""
    async with AsyncDataLoader[Batch](
        Digits(folder / "train", augment=True),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
    ) as loader:
        await train(loader, step)
        print_stages(loader.stats())
        print(f"\n{loader.explain()}")

    async with AsyncDataLoader[Batch](Digits(folder / "test"), batch_size=BATCH_SIZE, num_workers=WORKERS) as loader:
        return await accuracy(network, loader)


def main() -> int:
    """Run the whole example; return the exit status."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with asyncloader.")
    parser.add_argument("--folder", type=Path, default=CACHE, help="of the PNG files (%(default)s)")
    folder = parser.parse_args().folder
    write_digits(folder)

    torch.set_num_threads(1)  # so small a network gains nothing from more, and the workers need the cores
    torch.manual_seed(0)  # network, order and augmentation: all of them follow from this one seed
    network = make_network()
    step = make_step(network)
    with new_runner() as runner:
        reached = runner.run(train_and_test(folder, network, step))
    print(f"\ntest accuracy {reached:.1%} (wanted: above {WANTED_ACCURACY:.0%})")
    compare(folder / "train")
    return 0 if reached > WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
