"""The inputs: files made from a seed, a dataset over each, and the batches of an epoch.

Data path: seed -> files -> [datasets] -> loaders.

Every loader reads the same files by the same code. What is random in a sample follows from the sample's number, so that
all loaders must deliver the same content.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from .inputs_plan import OBJECTS
from .workloads import Checksum

Batch = dict[str, Any]

SEED = 20_252
SIDE = 224
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
DEVIATION = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
IMAGES, SHORT, LONG, SEQUENCES, TABLE_ROWS = 32, 16, 4, 32, 1024
"""Samples in a batch of images, of windows of 2,048 and of 32,768 tokens, of sequences, and of rows."""
FILE_TOKENS = 1 << 26  # of the memory-mapped file: 128 MiB
VOCABULARY = 50_257
NUMBERS, CATEGORIES = 100, 10
GROUP = 4 * TABLE_ROWS  # rows of a row group
FILES = 16
"""Different tables; more files are links to them."""
IN_SHARD = 32
TEXTS, LINES, LENGTH = 64, 2048, 512
"""Samples in a batch of texts, lines in a file, and bytes of a text in a sample."""


# ------------------------------------------------------------------------------------------------------- images


def jpeg(number: int) -> bytes:
    """A JPEG file like a photo's in size and detail: 500 x 375 on average, about 100 KB."""
    draw = np.random.default_rng((SEED, number))
    width, height = (int(side.clip(160, 1000)) for side in draw.normal((500, 375), (90, 70)))
    coarse = draw.integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = draw.integers(-12, 13, (height, width, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def augmented(image: Image.Image, number: int) -> torch.Tensor:
    """What torchvision's transforms of training on ImageNet do: float32 of (3, 224, 224).

    RandomResizedCrop(224), RandomHorizontalFlip, ToImage, ToDtype(scale=True), Normalize; in its steps and with its
    distributions. `number` seeds what is drawn.
    """
    draw = random.Random(number)
    left, top, width, height = _crop(draw, *image.size)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).div_(255).sub_(MEAN).div_(DEVIATION)


def _crop(draw: random.Random, width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return draw.randint(0, width - wide), draw.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


class Photos(Dataset[Batch]):
    """JPEG files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(map(str, folder.glob("*.jpg")))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Batch:
        with Image.open(self.files[index]) as image:
            return {"image": augmented(image.convert("RGB"), index), "label": index}


def _make_photos(folder: Path, samples: int) -> list[list[int]]:
    for number in range(samples):
        (folder / f"{number:06}.jpg").write_bytes(jpeg(number))
    return _shuffled(samples, IMAGES)


def _shuffled(samples: int, size: int) -> list[list[int]]:
    order = np.random.default_rng(SEED).permutation(samples).tolist()
    return [order[at : at + size] for at in range(0, samples, size)]


# ------------------------------------------------------------------------------------------------------- tokens


class Tokens:
    """A memory-mapped file of uint16, opened by each process that reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: npt.NDArray[np.uint16] | None = None

    def raw(self, start: int, length: int) -> npt.NDArray[np.uint16]:
        """Some tokens, where they are in the file."""
        if self._data is None:
            self._data = np.memmap(self.path, np.uint16, "r")
        return self._data[start : start + length]

    def cut(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Some tokens, as int64."""
        return self.raw(start, length).astype(np.int64)


class Windows(Dataset[Batch]):
    """A sample's number is where it starts in the file: `length` tokens, and those one further as targets."""

    def __init__(self, folder: Path, length: int) -> None:
        self.tokens = Tokens(folder / "tokens")
        self.length = length

    def __getitem__(self, index: int) -> Batch:
        return {
            "inputs": torch.from_numpy(self.tokens.cut(index, self.length)),
            "targets": torch.from_numpy(self.tokens.cut(index + 1, self.length)),
        }


def _make_tokens(length: int, size: int) -> Callable[[Path, int], list[list[int]]]:
    def make(folder: Path, samples: int) -> list[list[int]]:
        draw = np.random.default_rng(SEED)
        draw.integers(0, VOCABULARY, FILE_TOKENS, np.uint16).tofile(folder / "tokens")
        starts: list[list[int]] = draw.integers(0, FILE_TOKENS - length, (samples // size, size)).tolist()
        return starts

    return make


class Sequences(Dataset[torch.Tensor]):
    """Sequences of tokens, one behind the other in a file."""

    def __init__(self, folder: Path) -> None:
        self.tokens = Tokens(folder / "tokens")
        self.ends: list[int] = json.loads((folder / "ends.json").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.ends[index - 1] if index else 0
        return torch.from_numpy(self.tokens.cut(start, self.ends[index] - start))


def padded(samples: list[torch.Tensor]) -> Batch:
    """A batch of sequences: tokens of (n, longest) with zeros behind the shorter ones, and the lengths, of (n,)."""
    return {
        "tokens": pad_sequence(samples, batch_first=True),
        "lengths": torch.tensor([len(sample) for sample in samples]),
    }


def _make_sequences(folder: Path, samples: int) -> list[list[int]]:
    from asyncloader import BucketBatchSampler

    draw = np.random.default_rng(SEED)
    lengths = draw.lognormal(5.0, 0.9, samples).clip(16, 2048).astype(np.int64)
    draw.integers(1, VOCABULARY, int(lengths.sum()), np.uint16).tofile(folder / "tokens")
    (folder / "ends.json").write_text(json.dumps(lengths.cumsum().tolist()), encoding="utf-8")
    return list(BucketBatchSampler(lengths, batch_size=SEQUENCES, seed=SEED))


# -------------------------------------------------------------------------------------------------------- tables

NAMES = [f"number_{each:03}" for each in range(NUMBERS)], [f"category_{each}" for each in range(CATEGORIES)]


def row_sample(row: Batch) -> Batch:
    """A sample of a row that is a dict of Python values."""
    numbers, categories = NAMES
    return {
        "id": row["id"],
        "numbers": np.array([row[name] for name in numbers], np.float32),
        "categories": np.array([row[name] for name in categories], np.int64),
    }


class TableRows(IterableDataset[Batch]):
    """The rows of Parquet files, one after the other; each worker reads every n-th file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Batch]:
        for record in self._records():
            yield from map(row_sample, record.to_pylist())

    def _records(self) -> Iterator[Any]:
        from pyarrow import parquet

        worker = get_worker_info()
        for path in self.files if worker is None else self.files[worker.id :: worker.num_workers]:
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(TABLE_ROWS, use_threads=False)


class TableBatches(TableRows):
    """The same rows in whole batches, without a step for each row: what bare code does with them."""

    def __iter__(self) -> Iterator[Batch]:
        return map(_columns, self._records())


def _columns(record: Any) -> Batch:
    numbers, categories = ([record.column(name).to_numpy() for name in names] for names in NAMES)
    return {
        "id": torch.tensor(record.column("id").to_numpy()),
        "numbers": torch.from_numpy(np.stack(numbers, 1)),
        "categories": torch.from_numpy(np.stack(categories, 1)),
    }


def _make_table(folder: Path, samples: int) -> list[list[int]]:
    import pyarrow as pa
    from pyarrow import parquet

    draw = np.random.default_rng(SEED)
    for number in range(samples // GROUP):
        path = folder / f"{number:04}.parquet"
        if number >= FILES:
            path.hardlink_to(folder / f"{number % FILES:04}.parquet")
            continue
        columns: dict[str, Any] = {"id": np.arange(GROUP * number, GROUP * (number + 1))}
        columns |= {name: draw.normal(size=GROUP).astype(np.float32) for name in NAMES[0]}
        columns |= {name: draw.integers(0, 1000, GROUP) for name in NAMES[1]}
        parquet.write_table(pa.table(columns), path)
    return []


# --------------------------------------------------------------------------------------------------------- lines


def text_sample(line: Batch) -> Batch:
    """A sample of a parsed line: its number, and the first bytes of its text with zeros behind them."""
    content = line["text"].encode()[:LENGTH]
    data = np.zeros(LENGTH, np.uint8)
    data[: len(content)] = np.frombuffer(content, np.uint8)
    return {"id": line["id"], "text": data}


class Lines(IterableDataset[Batch]):
    """The lines of JSON files, one after the other; each worker reads every n-th file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        for path in self.files if worker is None else self.files[worker.id :: worker.num_workers]:
            with path.open("rb") as file:
                for line in file:
                    yield text_sample(json.loads(line))


def _make_lines(folder: Path, samples: int) -> list[list[int]]:
    draw = np.random.default_rng(SEED)
    for number in range(samples // LINES):
        lengths = draw.lognormal(6.5, 0.8, LINES).clip(64, 8000).astype(int)
        letters = draw.integers(97, 123, int(lengths.sum()), np.uint8).tobytes().decode()
        with (folder / f"{number:04}.jsonl").open("w", encoding="utf-8") as file:
            for place, end in enumerate(lengths.cumsum().tolist()):
                text = letters[end - lengths[place] : end]
                file.write(json.dumps({"id": LINES * number + place, "text": text, "source": "letters"}) + "\n")
    return []


# -------------------------------------------------------------------------------------------------------- shards


def member_sample(member: Batch) -> Batch:
    """A sample of a shard's members: a JPEG file and its label in JSON."""
    label = json.loads(member["json"])["label"]
    with Image.open(io.BytesIO(member["jpg"])) as image:
        return {"image": augmented(image.convert("RGB"), label), "label": label}


def members(shard: bytes) -> Iterator[Batch]:
    """The members of a shard, those of a sample together."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        found = ((each.name.partition("."), tar.extractfile(each)) for each in tar)
        parts = ((stem, suffix, file.read()) for (stem, _, suffix), file in found if file)
        for _, group in itertools.groupby(parts, lambda part: part[0]):
            yield {suffix: content for _, suffix, content in group}


def _make_shards(folder: Path, samples: int) -> list[list[int]]:
    for number in range(samples // IN_SHARD):
        with tarfile.open(folder / f"{number:04}.tar", "w") as tar:
            for label in range(IN_SHARD * number, IN_SHARD * (number + 1)):
                for suffix, content in (("jpg", jpeg(label)), ("json", json.dumps({"label": label}).encode())):
                    member = tarfile.TarInfo(f"{label:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return []


# ------------------------------------------------------------------------------------------------------- objects

NBYTES = 65_536  # of an object


def object_name(index: int) -> str:
    """The name of an object's file."""
    return f"{index:06}.bin"


def object_sample(data: bytes) -> Batch:
    """The sample of an object's bytes."""
    return {"object": np.frombuffer(data, np.uint8)}


class Objects(Dataset[Batch]):
    """The files of the objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Batch:
        return object_sample((self.folder / object_name(index)).read_bytes())


def _make_objects(folder: Path, samples: int) -> list[list[int]]:
    draw = np.random.default_rng(SEED)
    for index in range(samples):
        (folder / object_name(index)).write_bytes(draw.bytes(NBYTES))
    return _shuffled(samples, OBJECTS)


# --------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Input:
    """An input's files, dataset and batches.

    Args:
        make: writes the files of a number of samples into a folder, and gives the batches of an epoch, as lists of
            samples' numbers; none for a stream.
        dataset: over these files.
        collate: from samples to a batch.
        touch: from a batch to a number that its content determines; those of a stream add up to the same in any order.
    """

    make: Callable[[Path, int], list[list[int]]]
    dataset: Callable[[Path], Any]
    touch: Callable[[Batch], float]
    collate: Callable[[list[Any]], Batch] = default_collate


def _sum_images(batch: Batch) -> float:
    return float(batch["label"].sum()) + round(float(batch["image"][-1, 0, 112, 112]) * 58.395 + 123.675)


INPUTS = {
    "images": Input(_make_photos, Photos, _sum_images),
    "tokens2k": Input(
        _make_tokens(2048, SHORT),
        lambda folder: Windows(folder, 2048),
        lambda batch: float(batch["targets"][:, -1].sum()),
    ),
    "tokens32k": Input(
        _make_tokens(32768, LONG),
        lambda folder: Windows(folder, 32768),
        lambda batch: float(batch["targets"][:, -1].sum()),
    ),
    "lengths": Input(_make_sequences, Sequences, lambda batch: float(batch["tokens"][:, 0].sum()), padded),
    "table": Input(
        _make_table, lambda folder: TableRows(table_files(folder)), lambda batch: float(batch["categories"].sum())
    ),
    "lines": Input(_make_lines, lambda folder: Lines(line_files(folder)), lambda batch: float(batch["text"].sum())),
    "shards": Input(
        _make_shards, lambda folder: sorted(folder.glob("*.tar")), lambda batch: float(batch["label"].sum())
    ),
    "objects": Input(_make_objects, Objects, lambda batch: float(batch["object"][:, ::4096].sum())),
}


def table_files(folder: Path) -> list[Path]:
    """The Parquet files, in their order."""
    return sorted(folder.glob("*.parquet"))


def line_files(folder: Path) -> list[Path]:
    """The files of JSON lines, in their order."""
    return sorted(folder.glob("*.jsonl"))


class Endless(Iterable[Any]):
    """The items, again and again."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.items)


class Fingerprint:
    """The checksum of an epoch: of the samples in their order, or for a stream of the samples in any order."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._checksum = Checksum()
        self._total = 0

    def add(self, batch: Batch) -> None:
        """Add the samples of a batch, without the keys that webdataset adds."""
        leaves = [(name, np.asarray(leaf)) for name, leaf in sorted(batch.items()) if name != "__key__"]
        for row in range(len(leaves[0][1])):
            self._checksum.add_sample((name, leaf[row]) for name, leaf in leaves)
            if self._stream:
                self._total += self._checksum.crc
                self._checksum = Checksum()

    def __str__(self) -> str:
        return f"{self._total:x}" if self._stream else str(self._checksum)


def reference(row: str, folder: Path, batches: list[list[int]]) -> str:
    """The checksum of an epoch, read without a loader; of samples in any order for a stream."""
    given = INPUTS[row]
    fingerprint = Fingerprint(stream=not batches)
    dataset = given.dataset(folder)
    if row == "shards":
        samples = (member_sample(member) for path in dataset for member in members(path.read_bytes()))
        found: Iterable[Batch] = (default_collate([sample]) for sample in samples)
    elif batches:
        found = (given.collate([dataset[number] for number in batch]) for batch in batches)
    else:
        found = (default_collate([sample]) for sample in dataset)
    for batch in found:
        fingerprint.add(batch)
    return str(fingerprint)
