"""The datasets that the benchmarks load, and the checks of their batches.

A sample is a view of one preallocated array and costs next to nothing, so that transport is
measured; the photos alone are decoded, as in training. A sample's values follow from its position alone,
and no two samples are equal: the first element, or the label, names the sample, and the expected content
can be computed without any loader.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

IMAGE_SHAPE = (3, 224, 224)
IMAGE_ELEMENTS = 3 * 224 * 224
IMAGE_STRIDE = 16  # elements between two samples: 64 bytes, so that every view starts at a cache line
FEATURES = 16
TOKENS = 4


class LargeSamples(Dataset[torch.Tensor]):
    """Sample i is float32 (3, 224, 224) with the values 16*i, 16*i + 1, ...: exact, being below 2**24."""

    def __init__(self, samples: int) -> None:
        self.values = torch.arange(IMAGE_STRIDE * samples + IMAGE_ELEMENTS, dtype=torch.float32)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values.as_strided(IMAGE_SHAPE, (224 * 224, 224, 1), IMAGE_STRIDE * index)


class SmallSamples(Dataset[dict[str, Any]]):
    """Sample i is a dict: 16 float32 features and 4 int64 tokens, counting up from i, and the label i."""

    def __init__(self, samples: int) -> None:
        self.features = np.arange(samples + FEATURES, dtype=np.float32)
        self.tokens = np.arange(samples + TOKENS, dtype=np.int64)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "features": self.features[index : index + FEATURES],
            "tokens": self.tokens[index : index + TOKENS],
            "label": index,
        }


class IntSamples(Dataset[int]):
    """Sample i is the int i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Photos(Dataset[dict[str, Any]]):
    """Sample i is a dict: a JPEG of 3 x 224 x 224 that is decoded when it is asked for, one of 16, and the label i."""

    def __init__(self, samples: int) -> None:
        self.files = photo_files()
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.from_numpy(decoded(self.files[index % len(self.files)])), "label": index}


def photo_files() -> list[bytes]:
    """Sixteen JPEG files of about 20 KB: smooth noise, as a photo's. No two are equal."""
    from PIL import Image

    files: list[bytes] = []
    for number in range(16):
        coarse = np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((224, 224), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95)
        files.append(file.getvalue())
    return files


def decoded(file: bytes) -> npt.NDArray[np.uint8]:
    """The image as uint8 of (3, 224, 224)."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


@dataclass(frozen=True)
class Workload:
    """A dataset, its batch size, and how its batches are consumed and checked.

    Args:
        name: its key in `WORKLOADS`.
        dataset: makes the dataset of a number of samples.
        batch_size: samples in a batch.
        batches: batches in an epoch.
        inline_batches: batches in an epoch when no workers are used, where epochs alternate between loaders.
        stamp: the leaf of a batch, of shape (batch_size,), whose element times `stamp_scale` is the position.
        stamp_scale: positions per unit of the stamp.
        consumers: ways to consume a batch; each gives a number that the batch's position determines.
    """

    name: str
    dataset: Callable[[int], Dataset[Any]]
    batch_size: int
    batches: int
    inline_batches: int
    stamp: Callable[[Any], Any]
    stamp_scale: float
    consumers: dict[str, Consumer]

    def samples(self, batches: int) -> int:
        """How many samples `batches` batches take."""
        return self.batch_size * batches

    def positions(self, batch: Any) -> list[int]:
        """The positions of the samples in `batch`, read from the samples themselves."""
        return [round(float(value) * self.stamp_scale) for value in self.stamp(batch)]


@dataclass(frozen=True)
class Consumer:
    """The training step's work on a batch, and the expected result.

    Args:
        consume: from a batch to a number, inside the timed section.
        expected: from the positions of the samples in the batch to that number.
        tolerance: largest relative difference (float32 sums are not exact).
    """

    consume: Callable[[Any], float]
    expected: Callable[[Sequence[int]], float]
    tolerance: float = 0.0

    def check(self, results: Sequence[float], positions: Sequence[Sequence[int]]) -> None:
        """Compare the results of an epoch with the positions that each of its batches must have.

        Raises:
            ContentError: a batch is missing, comes twice, is out of its place or has other content.
        """
        if len(results) != len(positions):
            raise ContentError(f"{len(results)} batches arrived, {len(positions)} were to come")
        for order, (result, batch) in enumerate(zip(results, positions, strict=True)):
            wanted = self.expected(batch)
            if abs(result - wanted) > self.tolerance * abs(wanted):
                raise ContentError(f"batch {order}: the consumer got {result}, its content gives {wanted}")


class ContentError(Exception):
    """A loader delivered something else than the dataset holds: its speed means nothing."""


def _touch_large(batch: Any) -> float:
    return float(batch[0, 0, 0, 0])


def _sum_large(batch: Any) -> float:
    return float(torch.as_tensor(batch).sum())


def _expected_sum(positions: Sequence[int]) -> float:
    one = IMAGE_ELEMENTS * (IMAGE_ELEMENTS - 1) // 2
    return float(IMAGE_ELEMENTS * IMAGE_STRIDE * sum(positions) + len(positions) * one)


def _touch_small(batch: Any) -> float:
    return float(batch["label"][0]) + float(batch["features"][0, 0])


def _touch_ints(batch: Any) -> float:
    return float(batch[0]) + float(batch[-1])


def _touch_photos(batch: Any) -> float:
    return float(batch["label"][0]) + float(batch["image"][-1, 0, 112, 112])


def _expected_photos(positions: Sequence[int]) -> float:
    return float(positions[0]) + _photo_centres()[positions[-1] % 16]


@cache
def _photo_centres() -> list[float]:
    return [float(decoded(file)[0, 112, 112]) for file in photo_files()]


WORKLOADS = {
    "large": Workload(
        name="large",
        dataset=LargeSamples,
        batch_size=64,
        batches=100,
        inline_batches=12,
        stamp=lambda batch: batch[:, 0, 0, 0],
        stamp_scale=1 / IMAGE_STRIDE,
        consumers={
            "touch": Consumer(_touch_large, lambda positions: float(IMAGE_STRIDE * positions[0])),
            "sum": Consumer(_sum_large, _expected_sum, tolerance=1e-4),
        },
    ),
    "small": Workload(
        name="small",
        dataset=SmallSamples,
        batch_size=32,
        batches=600,
        inline_batches=500,
        stamp=lambda batch: batch["label"],
        stamp_scale=1.0,
        consumers={"touch": Consumer(_touch_small, lambda positions: float(2 * positions[0]))},
    ),
    "ints": Workload(
        name="ints",
        dataset=IntSamples,
        batch_size=256,
        batches=600,
        inline_batches=500,
        stamp=lambda batch: batch,
        stamp_scale=1.0,
        consumers={"touch": Consumer(_touch_ints, lambda positions: float(positions[0] + positions[-1]))},
    ),
    "photos": Workload(
        name="photos",
        dataset=Photos,
        batch_size=32,
        batches=32,
        inline_batches=8,
        stamp=lambda batch: batch["label"],
        stamp_scale=1.0,
        consumers={"touch": Consumer(_touch_photos, _expected_photos)},
    ),
}

BATCH_BYTES = 64 * IMAGE_ELEMENTS * 4  # of the large workload


@dataclass
class Checksum:
    """The CRC-32 of an epoch: every sample in its order, each leaf's name, dtype, shape and bytes."""

    crc: int = 0

    def add(self, batch: Any) -> None:
        """Add every sample of a batch: a tensor, an array or a dict of them, samples along dimension 0."""
        leaves = sorted(batch.items()) if isinstance(batch, dict) else [("", batch)]
        arrays = [(name, np.asarray(leaf)) for name, leaf in leaves]
        for row in range(len(arrays[0][1])):
            self.add_sample((name, array[row]) for name, array in arrays)

    def add_sample(self, leaves: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
        """Add one sample, given its leaves in the order of their names."""
        for name, leaf in leaves:
            self.crc = zlib.crc32(f"{name} {leaf.dtype} {leaf.shape}".encode(), self.crc)
            content: Any = np.ascontiguousarray(leaf)  # numpy's stubs know no buffer protocol before 3.12
            self.crc = zlib.crc32(content, self.crc)

    def __str__(self) -> str:
        return f"{self.crc:08x}"


def reference_checksum(name: str, batches: int) -> str:
    """The checksum of an epoch, from the definition of the samples: no dataset, no loader involved."""
    checksum = Checksum()
    files = photo_files() if name == "photos" else []
    for index in range(WORKLOADS[name].samples(batches)):
        if name == "large":
            start = IMAGE_STRIDE * index
            values = np.arange(start, start + IMAGE_ELEMENTS, dtype=np.float32)
            checksum.add_sample([("", values.reshape(IMAGE_SHAPE))])
        elif name == "small":
            leaves: list[tuple[str, npt.NDArray[Any]]] = [
                ("features", np.arange(index, index + FEATURES, dtype=np.float32)),
                ("label", np.asarray(index, dtype=np.int64)),
                ("tokens", np.arange(index, index + TOKENS, dtype=np.int64)),
            ]
            checksum.add_sample(leaves)
        elif name == "photos":
            label = np.asarray(index, dtype=np.int64)
            checksum.add_sample([("image", decoded(files[index % len(files)])), ("label", label)])
        else:
            checksum.add_sample([("", np.asarray(index, dtype=np.int64))])
    return str(checksum)
