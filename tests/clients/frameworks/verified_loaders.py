"""Sound loaders over code of other projects, for `asyncloader verify`: `test_verify.py` wants no problem of any.

Each function makes a loader. The frameworks are imported in it, so that one that is missing leaves the others alone.
`VERIFIED_DATA` is a folder for files, which the first call makes.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, WeightedRandomSampler

ROWS = 48


class Rows(Dataset[Any]):
    """Samples that follow from their indices, and from a draw of torch's."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "noise": torch.rand(3), "text": f"row {index}"}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _folder(name: str) -> Path:
    return Path(os.environ["VERIFIED_DATA"]) / name


# -------------------------------------------------------------------------------------------------------- torch


def tensors() -> Any:
    dataset = TensorDataset(torch.arange(ROWS), torch.arange(ROWS).square())
    return DataLoader(dataset, 4, shuffle=True, num_workers=2, generator=_seeded())


def weighted() -> Any:
    sampler = WeightedRandomSampler(torch.arange(1.0, ROWS + 1).tolist(), ROWS, generator=_seeded())
    return DataLoader(Rows(), 4, sampler=sampler, num_workers=1)


def distributed() -> Any:
    return DataLoader(Rows(), 4, sampler=DistributedSampler(Rows(), 2, 1, seed=3), num_workers=2)


# ----------------------------------------------------------------------------------------------- Hugging Face


def _table() -> Any:
    columns = {"id": [*range(ROWS)], "vector": [[float(i), i / 2] for i in range(ROWS)]}
    return import_module("datasets").Dataset.from_dict(columns)


def hf_map() -> Any:
    return DataLoader(_table().with_format("torch"), 8, shuffle=True, num_workers=2, generator=_seeded())


def hf_stream() -> Any:
    return DataLoader(_table().to_iterable_dataset(num_shards=4).with_format("torch"), 4, num_workers=2)


# ------------------------------------------------------------------------------------------------ webdataset


def _shards() -> list[str]:
    paths = [_folder("web") / f"shard-{number}.tar" for number in range(4)]
    if not paths[0].parent.exists():
        paths[0].parent.mkdir(parents=True)
        for number, path in enumerate(paths):
            with import_module("webdataset").TarWriter(str(path)) as tar:
                for sample in range(12 * number, 12 * number + 12):
                    array = np.full((2, 3), sample, np.float32)
                    tar.write({"__key__": f"{sample:04}", "npy": array, "cls": sample})
    return [str(path) for path in paths]


def web_shards() -> Any:
    wds = import_module("webdataset")
    dataset = wds.WebDataset(_shards(), shardshuffle=False).decode().to_tuple("npy", "cls")
    return DataLoader(dataset, 4, num_workers=2)


# ------------------------------------------------------------------------------------------------- torchdata


def torchdata_loader() -> Any:
    kind = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(Rows(), 4, shuffle=True, num_workers=2, generator=_seeded())


# ------------------------------------------------------------------------------------------------ trainers


def lightning_module() -> Any:
    pytorch = import_module("lightning.pytorch")
    return pytorch.LightningDataModule.from_datasets(
        train_dataset=Rows(), batch_size=4, num_workers=2
    ).train_dataloader()


# ------------------------------------------------------------------------------------------------ asyncloader


def by_length() -> Any:
    ours = import_module("asyncloader")
    lengths = [1 + index % 7 for index in range(ROWS)]
    sampler = ours.BucketBatchSampler(lengths, 4, 3)
    return ours.DataLoader(Rows(), batch_sampler=sampler, num_workers=2, seed=3)


def chosen() -> Any:
    """Make the loader that a file names, so that the same interpreters verify many."""
    return globals()[_folder("choice").read_text()]()
