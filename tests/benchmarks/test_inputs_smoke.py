"""The benchmark on inputs: its files, datasets, checks and tables. No speed is asserted."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from . import inputs, inputs_report
from .harness import Results
from .inputs_child import Epochs
from .inputs_data import (
    INPUTS,
    LENGTH,
    LINES,
    Fingerprint,
    Photos,
    Sequences,
    Windows,
    jpeg,
    members,
    padded,
    text_sample,
)
from .inputs_loaders import bare
from .inputs_plan import BARE, DECODING, ELASTIC, GRAIN, MODULES, ROWS
from .plan import FACADE, OURS, TORCH, Job
from .workloads import ContentError

RUN = ("lengths", "lines", "shards", "objects")
"""Rows of a map dataset, of a stream of local files and of a store. The others are slow: 10 to 25 seconds each."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in RUN)) for name in ROWS])
def test_row_is_measured_and_verified(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch and ours deliver the content of the files, beside a bare limit; the row comes into the page, and stays."""
    monkeypatch.setitem(ROWS, name, dataclasses.replace(ROWS[name], peers=()))
    results = inputs.measure(name, 1, quick=True, log=lambda _: None)
    for loader in (TORCH, *OURS, *ROWS[name].variants):
        assert all(results.median(f"{name}/{metric}", loader) > 0 for metric in ("rate", "stepped", "fed"))
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n\n## Memory bandwidth\n")
    page.with_suffix(".json").write_text("{}")
    inputs.save(name, results, "command", page)
    assert inputs_report.table(name, results) in page.read_text()


def test_photos_are_augmented_by_their_number(tmp_path: Path) -> None:
    """Files have mixed sizes, and samples torchvision's shape and scale; the same number gives the same sample."""
    INPUTS["images"].make(tmp_path, 8)
    sizes = {Image.open(io.BytesIO(jpeg(number))).size for number in range(8)}
    assert len(sizes) == 8
    photos = Photos(tmp_path)
    samples = [photos[number] for number in range(8)]
    assert {tuple(sample["image"].shape) for sample in samples} == {(3, 224, 224)}
    assert all(-2.2 < float(sample["image"].min()) < 0 < float(sample["image"].max()) < 2.7 for sample in samples)
    assert torch.equal(samples[3]["image"], Photos(tmp_path)[3]["image"])


def test_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    """A window is the file's tokens, and those one further; sequences tile their file, and get zeros behind them."""
    windows = Windows(tmp_path, 5)
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens")
    assert {name: leaf.tolist() for name, leaf in windows[7].items()} == {
        "inputs": [7, 8, 9, 10, 11],
        "targets": [8, 9, 10, 11, 12],
    }
    batches = INPUTS["lengths"].make(tmp_path, 640)
    sequences = Sequences(tmp_path)
    assert sorted(number for batch in batches for number in batch) == list(range(640))
    whole = np.fromfile(tmp_path / "tokens", np.uint16)
    assert torch.cat([sequences[number] for number in range(640)]).tolist() == whole.tolist()
    batch = padded([torch.tensor([3, 4]), torch.tensor([5])])
    assert batch["tokens"].tolist() == [[3, 4], [5, 0]]
    assert batch["lengths"].tolist() == [2, 1]


def test_texts_are_cut_and_padded(tmp_path: Path) -> None:
    """A sample has the first bytes of its line's text, and zeros behind them; each line is a sample."""
    INPUTS["lines"].make(tmp_path, LINES)
    assert [sample["id"] for sample in INPUTS["lines"].dataset(tmp_path)] == list(range(LINES))
    short, long = (text_sample({"id": 3, "text": text}) for text in ("aé", "b" * (LENGTH + 1)))
    assert bytes(short["text"]) == "aé".encode().ljust(LENGTH, b"\0")
    assert bytes(long["text"]) == b"b" * LENGTH


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and the others are measured."""
    ran: list[str] = []

    def attempt(job: Job, *_: Any, **__: Any) -> tuple[dict[str, Any], list[Any]]:
        ran.append(job.loader)
        return {"checksum": "0", "step": 1.0, "rate": 1.0}, []

    monkeypatch.setattr(inputs, "attempt", attempt)
    monkeypatch.setitem(MODULES, GRAIN, "no_module_of_this_name")
    logged: list[str] = []
    inputs.measure("lengths", 1, quick=True, log=logged.append)
    assert f"lengths, {GRAIN}: not run, no_module_of_this_name is not installed" in logged
    assert GRAIN not in ran
    assert set(OURS) <= set(ran)


def test_shards_have_a_label_beside_each_photo(tmp_path: Path) -> None:
    """Members of a sample come together."""
    INPUTS["shards"].make(tmp_path, 64)
    found = [each for path in INPUTS["shards"].dataset(tmp_path) for each in members(path.read_bytes())]
    assert [each["json"] for each in found] == [b'{"label": %d}' % label for label in range(64)]
    assert found[5]["jpg"] == jpeg(5)


@pytest.mark.parametrize("name", [BARE, DECODING])
def test_bare_code_is_counted(name: str, tmp_path: Path) -> None:
    """Every process of the bare code has done some samples."""
    (tmp_path / "batches.json").write_text(str(INPUTS["images"].make(tmp_path, 64)))
    assert bare(name, "images", tmp_path, "", 0.01) > 0


def test_fingerprint_finds_one_wrong_element() -> None:
    """A stream may have any order of samples, other loaders may not; a changed element is found in both."""
    batch = {"image": torch.arange(12.0).reshape(4, 3), "label": torch.arange(4)}

    def of(stream: bool, *batches: dict[str, Any]) -> str:
        fingerprint = Fingerprint(stream)
        for each in batches:
            fingerprint.add(each)
        return str(fingerprint)

    turned = {name: leaf.flip(0) for name, leaf in batch.items()}
    changed = batch | {"image": batch["image"] + torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])}
    assert of(True, batch) == of(True, turned) != of(True, changed)
    assert of(True, batch) != of(True, batch, {name: leaf[:1] for name, leaf in batch.items()})
    assert len({of(False, batch), of(False, turned), of(False, changed)}) == 3


def test_a_later_epoch_must_have_the_content_of_the_first(tmp_path: Path) -> None:
    """One batch of another place, or twice, ends the measurement."""
    epochs = Epochs(Job("inputs", "lengths", FACADE))
    schedule = epochs.schedule()
    first = next(schedule)
    batches = [padded([torch.tensor([number, number])]) for number in range(3)]
    first.results += [first.consume(batch) for batch in batches]
    second = next(schedule)
    second.results += [second.consume(batch) for batch in (batches[1], batches[0], batches[2])]
    with pytest.raises(ContentError, match="other content than the first"):
        next(schedule)


def test_table_says_who_is_faster() -> None:
    """A peer above ours is named in our line, and shares are of the bare code."""
    results = Results()
    for loader, rate in ((TORCH, 100.0), (OURS[0], 250.0), (OURS[1], 150.0), ("grain", 200.0), (BARE, 1000.0)):
        for metric in ("rate", "stepped", "fed"):
            results.add(f"lengths/{metric}", loader, rate)
    lines = {line.split(" | ")[0]: line for line in inputs_report.table("lengths", results).splitlines()}
    assert "**2.50** (2.50 to 2.50) | 25% |" in lines[f"| `{OURS[0]}`"]
    assert "behind" not in lines[f"| `{OURS[0]}`"]
    assert lines[f"| `{OURS[1]}`"].endswith("| behind grain |")


def test_table_says_what_a_fixed_order_costs() -> None:
    """Its rate is compared with that of the same loader without it, in the same rounds."""
    results = Results()
    for loader, rates in ((TORCH, (10, 10)), (FACADE, (100, 200)), (ELASTIC, (90, 190)), (BARE, (500, 500))):
        for rate in rates:
            for metric in ("rate", "stepped", "fed"):
                results.add(f"lines/{metric}", loader, float(rate))
    last = inputs_report.table("lines", results).splitlines()[-1]
    assert last == f"`{ELASTIC}`: 0.93 (0.90 to 0.95) of `{FACADE}`."
