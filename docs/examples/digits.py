"""Train a small network on handwritten digits, read from PNG files by an async dataset in two workers.

    python docs/examples/digits.py

1. scikit-learn's digits are written as PNG files, once.
2. `Digits` reads, decodes and augments them: its `__getitem__` is a coroutine.
3. `train` iterates an `AsyncDataLoader` with `async for`.
4. The same epoch then goes through the sync facade `DataLoader`, and through torch's own DataLoader.
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

import aiofiles
import numpy as np
import torch
import torch.utils.data
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

from asyncloader import AsyncDataLoader, DataLoader, Dataset

SIDE = 32  # pixels
BATCH_SIZE = 64
EPOCHS = 15
WORKERS = 2
WANTED_ACCURACY = 0.95
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

    def __init__(self, folder: Path, *, augment: bool = False) -> None:
        self.paths = sorted(folder.glob("*.png"))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.paths)


class Digits(DigitFiles):
    """What the workers read: the coroutines of many samples run at once."""

    async def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        how = draw(self.augment)  # before the first await, so that the draws come in the order of the samples
        async with aiofiles.open(path, "rb") as file:
            png = await file.read()
        return decode(png, *how), int(path.stem[-1])


class BlockingDigits(DigitFiles):
    """The synchronous twin, for torch's DataLoader: the same samples, one after the other."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        how = draw(self.augment)
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


def only_load(images: Tensor, labels: Tensor) -> None:  # noqa: ARG001
    """Look at one pixel and do nothing else: what is left is the time of loading."""
    images[-1, 0, 0, 0].item()


async def async_rate(loader: AsyncDataLoader[Batch], step: Step) -> float:
    """Return samples a second through one epoch of `async for`."""
    samples, begin = 0, time.perf_counter()
    async for images, labels in loader:
        step(images, labels)
        samples += len(labels)
    return samples / (time.perf_counter() - begin)


def sync_rate(loader: torch.utils.data.DataLoader[Batch], step: Step) -> float:
    """Return samples a second through one epoch of `for`."""
    samples, begin = 0, time.perf_counter()
    for images, labels in loader:
        step(images, labels)
        samples += len(labels)
    return samples / (time.perf_counter() - begin)


def median_rates(rate: Callable[[Step], float], step: Step) -> tuple[float, float]:
    """Return the median of five epochs: only loaded, and with the training step."""
    loading = statistics.median(rate(only_load) for _ in range(5))
    training = statistics.median(rate(step) for _ in range(5))
    return loading, training


def compare(train_set: Path, step: Step) -> None:
    """Print the rates of the loaders over the same files, each with two workers that run already."""
    dataset, twin = Digits(train_set, augment=True), BlockingDigits(train_set, augment=True)
    options: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "shuffle": True,
        "num_workers": WORKERS,
        "persistent_workers": True,
    }
    print(f"\nsamples/s, {WORKERS} workers, batches of {BATCH_SIZE}    loading only    with training step")

    def show(name: str, rates: tuple[float, float]) -> None:
        print(f"  {name:<38} {rates[0]:12,.0f}    {rates[1]:18,.0f}", flush=True)

    with new_runner() as runner, AsyncDataLoader[Batch](dataset, **options) as loader:
        runner.run(async_rate(loader, only_load))
        show("asyncloader, async for", median_rates(lambda step: runner.run(async_rate(loader, step)), step))

    with DataLoader[Batch](dataset, **options) as facade:
        sync_rate(facade, only_load)
        show("asyncloader, for", median_rates(lambda step: sync_rate(facade, step), step))

    with DataLoader[Batch](twin, **options) as facade:
        sync_rate(facade, only_load)
        show("asyncloader, for, synchronous twin", median_rates(lambda step: sync_rate(facade, step), step))

    stock: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(twin, **options)
    sync_rate(stock, only_load)
    show("torch, for, synchronous twin", median_rates(lambda step: sync_rate(stock, step), step))

    print("The files are in memory by now, so a blocking read is cheap and an async one has nothing to hide.")


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
        print("\nthe loader's statistics")
        for name, value in loader.stats().items():
            print(f"  {name:<28} {value:14,.3f}")
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
    compare(folder / "train", step)
    return 0 if reached > WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
