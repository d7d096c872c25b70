"""The content that is loaded on a card, and the checks of it there.

Images come ready made from a small pool, so that loaders are measured and not decoding; a sample's label is its
position. On the device each image is summed as integers, which is exact and costs next to nothing there; the sums and
the labels of all batches are looked at when the clock has stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

IMAGE_SHAPE = (3, 224, 224)
POOL = 64
ENDLESS = 1 << 40
"""Samples of an epoch that is never read to its end."""


class WrongContent(Exception):
    """A loader delivered something else than the dataset holds: its speed means nothing."""


class ReadyImages(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is image i modulo `POOL` of the pool, and the label i.

    Args:
        dtype: of the images: uint8 or float32.
        samples: length.
    """

    def __init__(self, dtype: torch.dtype, samples: int = ENDLESS) -> None:
        self.samples = samples
        # Each in memory of its own: pickling a view pickles all of the memory that it views.
        self._images = [image.clone() for image in image_pool(dtype)]

    @property
    def pool(self) -> torch.Tensor:
        """The images, as `image_pool` gives them."""
        return torch.stack(self._images)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index % POOL], index


def image_pool(dtype: torch.dtype) -> torch.Tensor:
    """The images, of shape (`POOL`, 3, 224, 224): all different, the same in every process."""
    generator = torch.Generator().manual_seed(20_251)
    pool = torch.randint(0, 256, (POOL, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    return pool if dtype is torch.uint8 else pool.to(dtype) / 255


def image_sums(images: torch.Tensor) -> torch.Tensor:
    """The sum of each image's words: bytes of shape (n, 3, 224, 224) to int64 of shape (n,)."""
    return images.view(torch.int32).sum(dim=(1, 2, 3))


class ImageCheck:
    """Looks at batches of `ReadyImages` on their device; nothing waits for it before `settle`.

    Args:
        pool: `image_pool`, on the device.
        batch: images in a batch.
    """

    def __init__(self, pool: torch.Tensor, batch: int) -> None:
        self._pool = pool
        self._sums = image_sums(pool)
        self._batch = batch
        self._labels: list[torch.Tensor] = []
        self._seen: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []

    def note(self, batch: Sequence[torch.Tensor]) -> None:
        """Record a batch's labels and sums."""
        images, labels = batch
        if images.device != self._pool.device or labels.device != self._pool.device:
            raise WrongContent(f"a batch on {images.device} and {labels.device}, not {self._pool.device}")
        self._labels.append(labels.clone())  # nothing of the batch is kept
        self._seen.append(image_sums(images))

    def compare(self, batch: Sequence[torch.Tensor]) -> None:
        """Record a batch's labels and sums, and compare all of its images with the pool."""
        self.note(batch)
        images, labels = batch
        self._same.append((images == self._pool[labels % POOL]).all())

    def settle(self) -> int:
        """Compare the record with the expected batches; returns their number.

        Raises:
            WrongContent: a batch is missing, comes twice, is out of its place or holds something else.
        """
        labels, seen = torch.stack(self._labels), torch.stack(self._seen)
        wanted = torch.arange(labels.numel(), device=labels.device).view(-1, self._batch)
        if labels.shape != wanted.shape:
            raise WrongContent(f"batches of {labels.shape[1]} images, not {self._batch}")
        if not torch.equal(labels, wanted):
            first = int((labels != wanted).any(1).nonzero()[0, 0])
            raise WrongContent(f"batch {first} has labels from {int(labels[first, 0])} on, out of their place")
        right = seen == self._sums[labels % POOL]
        if not bool(right.all()):
            first = int((~right).any(1).nonzero()[0, 0])
            raise WrongContent(f"batch {first} of {len(right)}: {int((~right[first]).sum())} images differ")
        if not bool(torch.stack(self._same).all()):
            raise WrongContent("an image differs from the pool's, with the same sum")
        return len(right)


# ------------------------------------------------------------------------------------------------ the soak

SOAK_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
LARGEST = 1 << 20
"""Bytes of a soak batch's tensors, at most."""


class Shape(NamedTuple):
    """One tensor of a soak batch.

    Args:
        dtype: its dtype.
        shape: its shape; may be empty, or hold zeros.
        transposed: its last two dimensions are swapped in memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    transposed: bool


def soak_shapes(index: int) -> list[Shape]:
    """The shapes of the tensors of batch `index`: one to four, mostly small, now and then large."""
    draw = random.Random(index)
    found: list[Shape] = []
    room = LARGEST if draw.random() < 0.02 else 1 << draw.randint(4, 16)
    for _ in range(draw.randint(1, 4)):
        dtype = draw.choice(SOAK_DTYPES)
        elements = max(1, room // 4 // dtype.itemsize)
        sides: list[int] = []
        for _ in range(draw.randint(0, 3)):
            sides.append(draw.randint(0 if draw.random() < 0.02 else 1, max(1, min(elements, 512))))
            elements //= max(1, sides[-1])
        found.append(Shape(dtype, tuple(sides), len(sides) >= 2 and draw.random() < 0.2))
    return found


def flat_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements' bytes, one tensor's after the other's, in logical order: uint8 of shape (n,)."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def weights(device: torch.device | str = "cpu") -> torch.Tensor:
    """A factor for each byte of `flat_bytes`: int64 of shape (`LARGEST`,), odd, all different."""
    return torch.arange(LARGEST, dtype=torch.int64, device=device) * 0x5851F42D4C957F2E + 1


def checksum(content: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the bytes modulo 2**64, the same on every device: int64 of shape ()."""
    return (content * factors[: len(content)]).sum()


class SoakBatches(Dataset[dict[str, Any]]):
    """Batch i: tensors of random bits in `soak_shapes(i)`, with its number and its checksum."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._factors: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._factors is None:
            self._factors = weights()
        generator = torch.Generator().manual_seed(index)
        tensors: list[torch.Tensor] = []
        for dtype, shape, transposed in soak_shapes(index):
            made = shape[:-2] + shape[:-3:-1] if transposed else shape
            size = dtype.itemsize
            for side in made:
                size *= side
            high = 2 if dtype is torch.bool else 256
            bits = torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8)
            tensor = bits.view(dtype).view(made)
            tensors.append(tensor.mT if transposed else tensor)
        what = torch.stack([torch.tensor(index), checksum(flat_bytes(tensors), self._factors)])
        return {"tensors": tensors, "what": what}
