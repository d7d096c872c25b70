"""The reference pages list what there is: every option with its default, every statistic, every public name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import asyncloader
from asyncloader import AsyncDataLoader, DataLoader

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"


def rows(page: str) -> list[list[str]]:
    """Return the cells of the page's table rows that start with a name in backquotes, without the backquotes."""
    lines = re.findall(r"^\| (`.*) \|$", (REFERENCE / page).read_text(), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("loader", [AsyncDataLoader, DataLoader], ids=lambda loader: loader.__name__)
def test_options_page_is_the_signature(loader: type) -> None:
    """The page lists every argument of both loaders, in order, with its default."""
    parameters = list(inspect.signature(loader).parameters.values())
    defaults = ["" if p.default is p.empty else repr(p.default).replace("'", '"') for p in parameters]
    listed = [(name, default) for name, default, _ in rows("options.md")]
    assert listed == [(p.name, d) for p, d in zip(parameters, defaults, strict=True)]


@pytest.mark.parametrize("loader", [AsyncDataLoader, DataLoader], ids=lambda loader: loader.__name__)
def test_statistics_page_lists_every_key(loader: type) -> None:
    """The page's table and `stats()` have the same keys, in the same order."""
    with loader([1, 2, 3]) as made:
        keys = list(made.stats())
    assert [row[0] for row in rows("statistics.md") if row[0].startswith(("data/", "device/", "store/"))] == keys


def test_every_public_name_is_on_a_page() -> None:
    """A name that `asyncloader` exports is documented on the page of the API or of the errors."""
    text = "".join((REFERENCE / page).read_text() for page in ("api.md", "errors.md", "names.md"))
    assert [name for name in asyncloader.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_names_page_lists_torchs_names() -> None:
    """Every public name of `torch.utils.data` has a row, and *torch's* means the same object."""
    listed = {row[0]: row[-1] for row in rows("names.md") if len(row) == 4}
    assert set(torch.utils.data.__all__) <= set(listed)
    for name in torch.utils.data.__all__:
        same = getattr(asyncloader, name) is getattr(torch.utils.data, name)
        assert same == listed[name].startswith("torch's"), name


def test_every_public_name_is_there() -> None:
    """Names are looked up late, so a typing error would show only when a user asks for the name."""
    assert all(getattr(asyncloader, name) is not None for name in asyncloader.__all__)
