"""The benchmark of growth: its plan, its checks, its page and its picture, on small runs. No number is asserted."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pairwise import quickly

from . import growth, growth_chart
from .growth_child import Epochs
from .growth_plan import CURVES, DAY, LOADERS, OURS, TORCH, TORCH_SAMPLES, Point, Soak, soaks
from .harness import JobFailed
from .workloads import ContentError

FIGURES = {"rate": 10.0, "cpu": 1e-4, "memory": 3e8, "constructor": 1e-3, "first": 0.05}


def batches(*positions: list[int]) -> list[torch.Tensor]:
    """Batches of samples of two equal numbers each."""
    return [torch.tensor([[position, position] for position in batch]) for batch in positions]


@pytest.mark.thorough
@pytest.mark.parametrize("loader", quickly(LOADERS, OURS))
def test_a_point_is_measured_and_verified(loader: str) -> None:
    """A point runs in a process of its own to the end, and gives every figure."""
    result = growth.run(Point(loader, workers=1, samples=100, seconds=0.05))
    assert sorted(result) == sorted(FIGURES)
    assert min(result.values()) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("loader", quickly(LOADERS, OURS))
def test_a_soak_holds_no_more_at_its_end(loader: str) -> None:
    """Epochs later the processes have as many descriptors, threads and tasks as before."""
    begin, *later = growth.run(Soak(loader, epochs=6, batches=40))
    assert [look["batches"] for look in (begin, *later)] == [60, 140, 220]
    for name in ("descriptors", "threads", "processes", "tasks"):
        assert {look[name] for look in later} == {begin[name]}


def test_failure_has_the_reason() -> None:
    """The error has the output of the point's process."""
    with pytest.raises(JobFailed, match=r"exit code 1[\s\S]*no workers to make a batch|exit code 1[\s\S]*Error"):
        growth.run(Point(OURS, workers=-1))


def test_whole_epochs_are_accepted() -> None:
    """Every sample once, in any order; later epochs are not looked at."""
    epochs = Epochs(batches([3, 1], [0, 2]), 4, 2)
    assert [next(epochs) for _ in range(6)] == [1, 2, 1, 2, 1, 2]
    assert epochs.whole == 2


@pytest.mark.parametrize(
    "wrong",
    [
        batches([3, 1], [0, 1]),
        batches([3, 1], [0]),
        batches([3, 1], [0, 4]),
        [torch.tensor([[3, 3], [1, 2]])],
    ],
    ids=["twice", "missing", "beyond", "torn"],
)
def test_wrong_contents_end_the_measurement(wrong: list[torch.Tensor]) -> None:
    """A sample that is missing, comes twice, does not exist or is torn is an error, not a figure."""
    epochs = Epochs(wrong, 4, 2)
    with pytest.raises(ContentError):
        deque((next(epochs) for _ in range(3)), maxlen=0)


def test_the_plan_has_every_value_of_each_loader() -> None:
    """torch's curve of samples ends where its list of indices would not fit; the soak is a day."""
    planned = list(growth.jobs([*CURVES, growth.SOAK], list(LOADERS), quick=False))
    wanted = [f"{loader} {value}" for _, values in CURVES.values() for value in values for loader in LOADERS]
    left_out = [f"{TORCH} {value}" for value in CURVES["samples"][1] if value > TORCH_SAMPLES]
    assert [key for part, key, _ in planned if part in CURVES] == [key for key in wanted if key not in left_out]
    assert {soak.loader: soak.epochs * soak.batches for soak in soaks(quick=False)} == {OURS: DAY, TORCH: DAY // 10}


def made_up() -> growth.Kept:
    """A result for every point, and for the soaks."""
    kept: growth.Kept = {}
    look = dict.fromkeys(("batches", "memory", "objects", "tasks", "descriptors", "threads", "processes"), 5.0)
    for part, key, job in growth.jobs([*CURVES, growth.SOAK], list(LOADERS), quick=True):
        result: Any = FIGURES if isinstance(job, Point) else [look] * 3
        kept.setdefault(part, {})[key] = [{"date": "2026-01-01", "result": result}]
    return kept


def test_the_page_has_a_line_for_each_value() -> None:
    """Tables are even, and every value and every look is in them."""
    text = growth.page(made_up())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == sum(len(values) + 2 for _, values in CURVES.values()) + 2 + 3 * len(LOADERS)
    assert all(f"| {value:,} |" in text for _, values in CURVES.values() for value in values)
    assert len({line.count("|") for line in rows if "| 10 |" in line or "| 64 |" in line}) == 1


@pytest.mark.parametrize("curves", [[], ["batch"], list(CURVES)])
def test_the_picture_is_inside_its_frame(curves: list[str]) -> None:
    """Every spot of every panel, also where points are missing."""
    kept = {curve: points for curve, points in made_up().items() if curve in curves}
    picture = ET.fromstring(growth_chart.draw(kept, growth.median))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    spots = picture.findall("{*}circle")
    assert len(spots) == 4 * sum(len(points) for points in kept.values())
    assert all(0 < float(spot.attrib["cx"]) < width and 0 < float(spot.attrib["cy"]) < height for spot in spots)


def test_pieces_are_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails keeps the points before it, and `--missing` measures the others alone; three rounds are kept."""
    ran: list[int] = []

    def run(job: Point) -> dict[str, float]:
        if job.workers == 8 and len(ran) < 4:
            raise JobFailed("no luck")
        ran.append(job.workers)
        return FIGURES

    monkeypatch.setattr(growth, "run", run)
    page = tmp_path / "growth.md"
    monkeypatch.setattr(growth, "PAGE", page)
    monkeypatch.setattr(growth, "ROOT", tmp_path)
    arguments = ["--save", "--parts", "workers", "--loaders", OURS]
    assert growth.main(arguments) == 2
    assert "no luck" in capsys.readouterr().err
    assert ran == [1, 2, 4]
    assert "| 4 |" in page.read_text()
    ran.append(0)
    assert growth.main([*arguments, "--missing"]) == 0
    assert ran[4:] == [8, 16, 32, 64]
    for _ in range(4):
        assert growth.main(arguments) == 0
    kept = json.loads(page.with_suffix(".json").read_text())
    assert [len(rounds) for rounds in kept["workers"].values()] == [growth.ROUNDS] * 7
    assert page.with_suffix(".svg").exists()
