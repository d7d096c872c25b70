"""Which modules a definition's fingerprint covers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

import pytest

import asyncloader
from asyncloader.service.protocol.definition import _imported_names, fingerprint

SHAPES = '''
"""import a_docstring"""
import a, b.c as d; import e
if True: from f import g
from . import h
from ..i import (j, k as l,  # import a_comment
    m,)
from n import *
from o import p, \\
    q
def r():
    import s
    yield from t
    raise ValueError from u
lambda: v
'''
PACKAGE = "one.two.three"


def parsed(source: str) -> Iterator[str]:
    """The result that `_imported_names` must have, found by a syntax tree."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), PACKAGE) if node.level else node.module
            yield str(base)
            yield from (f"{base}.{each.name}" for each in node.names)


def test_imports_are_found() -> None:
    """All forms of Python's imports are found."""
    assert sorted(_imported_names(SHAPES, PACKAGE)) == sorted(parsed(SHAPES))
    for path in Path(asyncloader.__file__).parent.rglob("*.py"):
        source = path.read_text()
        assert {*_imported_names(source, PACKAGE)} >= {*parsed(source)}


@pytest.mark.parametrize("name", ["packed", "packed.data"])
def test_a_definition_in_a_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition is in the package's `__init__`: the modules that this imports of the package are covered."""
    folder = tmp_path.joinpath(*name.split("."))
    folder.mkdir(parents=True)
    for package in (tmp_path / "packed", folder):
        (package / "__init__.py").touch()
    (folder / "__init__.py").write_text("from .images import Images\ndef train():\n    return Images()\n")
    images = folder / "images.py"
    images.write_text("class Images:\n    size = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        train = import_module(name).train
        first = fingerprint(train)
        images.write_text("class Images:\n    size = 2\n")
        assert fingerprint(train) != first
    finally:
        for each in set(sys.modules) - before:
            del sys.modules[each]
