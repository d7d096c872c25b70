"""Folders that LitData and Lance have written, and what the packages themselves read from them.

    python -m tests.helpers.package_tables FOLDER PACKAGE

writes those of a package, and to ``expected-PACKAGE.json`` the samples of each kind as text. It is a program, because
processes that are forked from one that has used Lance cannot read by Lance.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncloader import LanceTable, LitDataFolder
from tests import script_server
from tests.helpers.running import PATIENCE_S, ROOT, environment
from tests.helpers.seeded_runs import Stepwise

BLOCK = 8
N = 50

ITEMS: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
    "items": (
        lambda n: {
            "n": n,
            "array": np.arange(n % 5 + 1),
            "matrix": torch.full((2, n % 3), float(n)),
            "vector": torch.arange(n % 4),
            "text": f"t{n}",
            "raw": bytes([n]),
            "nested": (n / 2, n % 2 == 0),
        },
        {},
    ),
    "pairs": (lambda n: (n, np.arange(3) + n), {}),
    "rows of text": (lambda n: {"text": f"hello {n}", "label": str(n)}, {}),
    "nested rows": (lambda n: {"text": f"hello {n}", "list": [n] * (n % 3), "more": {"a": n}}, {}),
    "frames": (lambda n: {"n": n, "array": np.arange(n % 5 + 50)}, {"compression": "zstd"}),
    "compressed samples": (
        lambda n: {"n": n, "array": np.arange(n % 5 + 50)},
        {"compression": "zstd", "compression_level": "sample"},
    ),
    "whole files": (
        lambda n: {"n": n, "array": np.arange(n % 5 + 50)},
        {"compression": "zstd", "compression_level": "chunk"},
    ),
    "tokens": (lambda n: torch.arange(n * 10, n * 10 + 7), {}),
}
LITDATA = [kind for kind in ITEMS if kind != "whole files"]
LANCE = ["lance", "lance, some columns", "lance, an older version"]
PACKAGES = {"litdata": LITDATA, "lance": LANCE}


def open_table(kind: str, folder: Path | str) -> Any:
    """Make the dataset of a kind."""
    if kind in ITEMS:
        return LitDataFolder(Path(folder) / kind, block_size=BLOCK if kind == "tokens" else None)
    options: dict[str, dict[str, Any]] = {
        "lance": {},
        "lance, some columns": {"columns": ["vector", "n"]},
        "lance, an older version": {"version": 1},
    }
    return LanceTable(Path(folder) / "rows.lance", **options[kind])


def text_of(value: Any) -> str:
    """Return a text with all of a value: its types, dtypes and numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {text_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    return repr(bytes(value) if isinstance(value, memoryview) else value)


def texts_of(samples: Sequence[Any]) -> list[str]:
    """Collate samples to their texts."""
    return [text_of(sample) for sample in samples]


def read_table(
    kind: str, folder: str, *, loop: str = "sync", steps: int | None = None, **options: Any
) -> list[list[str]]:
    """Read an epoch of a loader over the dataset of a kind. With `steps`, another loader continues after them."""
    head: list[list[str]] = []
    state = None
    if steps is not None:
        with Stepwise(loop, open_table(kind, folder), collate_fn=texts_of, **options) as run:
            run.begin()
            head, state = run.take(steps), run.loader.state_dict()
    with Stepwise(loop, open_table(kind, folder), collate_fn=texts_of, **options) as run:
        if state is not None:
            run.loader.load_state_dict(state)
        run.begin()
        return head + run.rest()


def written(folder: Path, package: str) -> dict[str, list[str]]:
    """Have another process write the folders of a package. Returns the samples of each kind; nothing where the package
    is not installed.
    """
    if find_spec(package) is None:
        return {}
    command = [sys.executable, "-m", "tests.helpers.package_tables", str(folder), package]
    env = environment() | {"PYTHONWARNINGS": "default"}  # the packages' own
    ended = script_server.run(command, timeout=3 * PATIENCE_S, env=env, cwd=ROOT)  # the packages' imports take seconds
    assert not ended.returncode, ended.stderr
    found: dict[str, list[str]] = json.loads((folder / f"expected-{package}.json").read_text())
    return found


def _write_litdata(folder: Path) -> dict[str, list[str]]:
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming import Cache

    found = {}
    for kind, (make, options) in ITEMS.items():
        loader: dict[str, Any] = {"item_loader": TokensLoader()} if kind == "tokens" else {}
        size = {"chunk_bytes": 300} if kind == "tokens" else {"chunk_size": 12}
        cache = Cache(str(folder / kind), **size, **loader, **options)
        for n in range(N):
            cache[n] = make(n)
        cache.done()
        cache.merge()
        if kind != "whole files":
            loader = {"item_loader": TokensLoader(BLOCK)} if kind == "tokens" else {}
            read = StreamingDataset(str(folder / kind), **loader)
            found[kind] = texts_of([read[number] for number in range(len(read))])
    return found


def _write_lance(folder: Path) -> dict[str, list[str]]:
    import lance
    import pyarrow as pa

    def table(first: int, count: int) -> pa.Table:
        numbers = range(first, first + count)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4 * count, dtype="f4") + first), 4)
        texts = [None if n % 7 == 0 else f"t{n}" for n in numbers]
        return pa.table(
            {"n": list(numbers), "text": texts, "vector": vectors, "raw": [bytes([n]) for n in numbers]},
        ).append_column("list", [[[n] * (n % 3) for n in numbers]])

    where = str(folder / "rows.lance")
    lance.write_dataset(table(0, 20), where, max_rows_per_file=7)
    lance.write_dataset(table(20, 30), where, mode="append", max_rows_per_file=11)
    lance.dataset(where).delete("n % 10 = 3")

    def rows(version: int | None, columns: list[str] | None) -> list[str]:
        read = lance.dataset(where, version=version).to_table(columns=columns).to_pylist()
        return texts_of([{**row, "vector": np.array(row["vector"], np.float32)} for row in read])

    return {"lance": rows(None, None), LANCE[1]: rows(None, ["vector", "n"]), LANCE[2]: rows(1, None)}


if __name__ == "__main__":
    place, name = Path(sys.argv[1]), sys.argv[2]
    expected = {"litdata": _write_litdata, "lance": _write_lance}[name](place)
    (place / f"expected-{name}.json").write_text(json.dumps(expected))
