"""RecBole: the loaders of `data_preparation` for training, with drawn negatives, and for validation."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.libraries.gaps import fill_numpy

fill_numpy()

from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402


def batches(workers: int) -> dict[str, list[Any]]:
    """Read an epoch of each loader."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"u{n % 9}\ti{n * 7 % 23}\t{n % 5 + 1}\t{n}" for n in range(160)]
        header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
        (Path(folder) / "toy").mkdir()
        (Path(folder) / "toy" / "toy.inter").write_text("\n".join([header, *lines]))
        options = {"data_path": folder, "use_gpu": False, "worker": workers, "train_batch_size": 32, "state": "ERROR"}
        arguments, sys.argv = sys.argv, sys.argv[:1]  # RecBole reads options from it
        try:
            config = Config(model="BPR", dataset="toy", config_dict=options)
        finally:
            sys.argv = arguments
        train, valid, _ = data_preparation(config, create_dataset(config))
        return {
            "train": [dict(batch.interaction) for batch in train],
            "valid": [[dict(batch[0].interaction), *batch[1:]] for batch in valid],
        }
