"""Which modules a definition's fingerprint covers, found in any thread."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import resolve_name
from pathlib import Path

import asyncloader
from asyncloader.service.fingerprint import _imported_names, fingerprint
from tests.service import definitions

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
    """All forms of Python's imports are found, and nothing else."""
    sources = [path.read_text() for path in Path(asyncloader.__file__).parent.rglob("*.py")]
    for source in (SHAPES.replace("    raise ValueError from u\n", ""), *sources):
        assert sorted(_imported_names(source, PACKAGE)) == sorted(parsed(source))


def test_a_cell_that_is_no_python_has_no_imports() -> None:
    """For example a cell with a magic command in which a bracket or a quote is missing."""
    assert list(_imported_names("%run (\nimport a", "")) == []


def test_threads_at_a_time() -> None:
    """Loaders are made in several threads at a time.

    CPython 3.11 cannot build syntax trees in two threads if the collector runs Python code in between.
    """

    def collecting(phase: str, info: dict[str, int]) -> None:
        for _ in range(50):  # another thread gets its turn
            pass

    before, often = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    gc.callbacks.append(collecting)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = set(threads.map(fingerprint, [definitions.numbers.function] * 60))
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*often)
        sys.setswitchinterval(before)
    assert len(found) == 1
