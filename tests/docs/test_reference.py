"""The reference pages are complete: every option with its default, every statistic, every public name."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncloader
from asyncloader import AsyncDataLoader, DataLoader, StatefulDataLoader
from asyncloader.options.declaration import OUR_OPTION_NAMES
from asyncloader.options.objects import OPTION_OBJECTS
from asyncloader.telemetry.counters import STAGES
from asyncloader.telemetry.figures import FIGURES, NODE_FIGURES, STAGE_HELP
from docs.options import NEEDED, PAGE, filled, meanings
from tests import script_server
from tests.helpers.datasets import Numbers

DOCS = Path(__file__).parent.parent.parent / "docs"
REFERENCE = DOCS / "reference"


def rows(page: str) -> list[list[str]]:
    """Return the cells of the page's table rows that start with a name in backquotes, without the backquotes."""
    lines = re.findall(r"^\| (`.*) \|$", (REFERENCE / page).read_text(), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("loader", [AsyncDataLoader, DataLoader], ids=lambda loader: loader.__name__)
def test_options_page_is_the_signature(loader: type) -> None:
    """The page lists every argument of both loaders and every field of the option objects, in order, with defaults.
    Of asyncloader's own arguments, those that most runs need stand first.
    """
    signature = inspect.signature(loader).parameters
    assert list(NEEDED) == [name for name in signature if name in NEEDED]
    torchs = [each for name, each in signature.items() if name not in OUR_OPTION_NAMES]
    rare = [signature[name] for name in OUR_OPTION_NAMES if name not in NEEDED]
    parameters = [*torchs, *(signature[name] for name in NEEDED), *rare]
    for kind in OPTION_OBJECTS.values():
        parameters += inspect.signature(kind).parameters.values()
    defaults = ["" if p.default is p.empty else repr(p.default).replace("'", '"') for p in parameters]
    listed = [(row[0], row[1]) for row in rows("options.md")]
    assert listed == [(p.name, d) for p, d in zip(parameters, defaults, strict=True)]


def test_options_page_is_the_docstring() -> None:
    """The page has the first sentence of each option's docstring, which editors show: ``python docs/options.py``
    writes it.
    """
    assert PAGE.read_text() == filled(PAGE.read_text())


@pytest.mark.parametrize("loader", [AsyncDataLoader, DataLoader, StatefulDataLoader], ids=lambda each: each.__name__)
def test_a_constructor_documents_its_own_options(loader: Any) -> None:
    """All of them in order, and no other; its `__qualname__` names the class."""
    assert list(meanings(loader.__init__)) == list(inspect.signature(loader).parameters)
    assert loader.__init__.__qualname__ == f"{loader.__name__}.__init__"
    assert set(loader.__init__.__annotations__) == {*inspect.signature(loader).parameters, "return"}


def test_options_page_says_what_the_stateful_loader_lacks() -> None:
    """torchdata's loader has no seeded mode: page, docstring and constructor agree on the options left out."""
    missing = inspect.signature(DataLoader).parameters.keys() - inspect.signature(StatefulDataLoader).parameters.keys()
    said = PAGE.read_text().partition("all but those of seeded mode")[2].partition("##")[0]
    assert set(re.findall("`([a-z_]+)`", said)) == missing
    assert set(re.findall("`([a-z_]+)`", (StatefulDataLoader.__doc__ or "").partition("seeded mode:")[2])) >= missing
    kind: Any = StatefulDataLoader
    for name in missing:
        with pytest.raises(TypeError, match=rf"^StatefulDataLoader\.__init__\(\) got an unexpected .* '{name}'$"):
            kind(Numbers(2), **{name: None})


@pytest.mark.parametrize("loader", [AsyncDataLoader, DataLoader], ids=lambda loader: loader.__name__)
def test_statistics_page_lists_every_key(loader: type) -> None:
    """The page's tables, `stats()` and `metrics()` have the same keys, in the same order, with the same words."""
    with loader([1, 2, 3]) as made:
        keys, described = list(made.stats()), {each.name: each.help for each in made.metrics()}
    table = {row[0]: row[1:] for row in rows("statistics.md") if row[0].startswith(("data/", "device/", "store/"))}
    assert list(table) == keys
    assert table == {key: [figure.unit, figure.help.strip("`")] for key, figure in FIGURES.items()}
    nodes = {row[0]: row[1:] for row in rows("statistics.md") if row[0] in NODE_FIGURES}
    assert nodes == {name: [figure.unit, figure.help] for name, figure in NODE_FIGURES.items()}
    stages = {row[0]: row[1] for row in rows("statistics.md") if row[0] in STAGES}
    assert stages == {stage: text.strip("`") for stage, text in STAGE_HELP.items()}
    assert tuple(stages) == STAGES
    told = {f"{figure.unit} {figure.help}" for figure in FIGURES.values() if figure.kind != "derived"}
    assert told < set(described.values())


def test_every_public_name_is_on_a_page() -> None:
    """A name of `asyncloader` is documented on the page of the API, of the errors or of the names, listed or not."""
    text = "".join((REFERENCE / page).read_text() for page in ("api.md", "errors.md", "names.md"))
    names = {*asyncloader.__all__, *asyncloader._OWN}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()
    assert len(asyncloader._OWN.keys() & set(asyncloader.__all__)) <= 48


@pytest.mark.parametrize("loader", [AsyncDataLoader, DataLoader], ids=lambda loader: loader.__name__)
def test_the_api_page_has_every_member(loader: type) -> None:
    """It lists every public method and attribute of our own, except the options, which have a page of their own."""
    page = (REFERENCE / "api.md").read_text()
    entry = page.partition(f".. autoclass:: asyncloader.{loader.__name__}\n")[2].partition("autoclass")[0]
    own = {name for name in dir(loader) if not name.startswith("_")} - set(dir(torch.utils.data.DataLoader))
    own -= {"progress", "where"}  # gone: calls say what to do instead
    documented = set(re.findall(r"auto(?:method|property):: ([a-z]\w*)", entry))
    assert documented == own - inspect.signature(loader).parameters.keys()


def test_every_entry_of_the_api_page_has_a_text() -> None:
    """Classes, functions, methods and properties have docstrings: a heading without a text is of no help."""
    current: Any = None
    entries = re.findall(r"auto(class|function|method|property):: (\S+)", (REFERENCE / "api.md").read_text())
    assert len(entries) > 100
    for kind, name in entries:
        if kind in ("class", "function"):
            module, _, member = name.rpartition(".")
            found = current = getattr(importlib.import_module(module), member)
        else:
            found = getattr(current, name)
        assert found.__doc__, name


@pytest.mark.thorough
def test_the_built_api_page_shows_types(tmp_path: Path) -> None:
    """The signatures name the types of the arguments and of the result, and no base class of ours."""
    pytest.importorskip("sphinx", reason="the pages are built with the extra docs")
    for name, source in (("conf.py", DOCS / "conf.py"), ("index.md", REFERENCE / "api.md")):
        (tmp_path / name).write_text(source.read_text())
    build = [sys.executable, "-m", "sphinx", "-Q", "-b", "text", "-D", "html_static_path=", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    ran = script_server.run([*build, str(tmp_path / "built")], cwd=tmp_path, env=env, timeout=200)
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "built" / "index.txt").read_text()
    assert "num_workers: int = 0," in page
    assert "load_state_dict(state_dict: dict[str, Any]) -> None" in page
    assert "Bases: " not in page
    assert not re.findall(r"\w: ~|<(?:function|class) ", page), "a default that is no code spoils its signature"


def test_the_how_tos_are_ordered_by_need() -> None:
    """All pages are listed: those that most readers need first, those for users of other libraries last."""
    listed = re.findall(r"^how-to/([\w-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in (DOCS / "how-to").glob("*.md"))
    assert listed[0] == "migrate-from-torch"
    assert listed[-3:] == [f"migrate-from-{name}" for name in ("torchdata", "dataloader2", "oneflow")]


def test_names_page_lists_torchs_names() -> None:
    """Every public name of `torch.utils.data` has a row, and a row with *torch's* means the same object."""
    listed = {row[0]: row[-1] for row in rows("names.md") if len(row) == 4}
    assert set(torch.utils.data.__all__) <= set(listed)
    for name in torch.utils.data.__all__:
        same = getattr(asyncloader, name) is getattr(torch.utils.data, name)
        assert same == listed[name].startswith("torch's"), name


def test_every_public_name_is_there() -> None:
    """Names are looked up lazily, so that a typing error would show only when a user asks for the name."""
    names = {*asyncloader.__all__, *asyncloader._OWN, *asyncloader._TORCHS}
    assert all(getattr(asyncloader, name) is not None for name in names)


def test_the_api_page_has_dataloader2() -> None:
    """The page lists every public name of it, of its adapters, graph functions and datapipes, except torch's own."""
    page = (REFERENCE / "api.md").read_text()
    listed = set(re.findall(r"auto(?:class|function):: (asyncloader\.dataloader2\.[\w.]+)", page))
    names = {
        f"asyncloader.dataloader2{module}.{name}"
        for module in ("", ".adapter", ".graph", ".datapipes", ".compat")
        for name in importlib.import_module(f"asyncloader.dataloader2{module}").__all__
        if name not in ("DataPipe", "DataPipeGraph", "traverse_dps", "register_forms")
    }
    assert names - listed == set()
    for name in listed:
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name
