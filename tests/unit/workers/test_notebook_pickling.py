from __future__ import annotations

import pickle
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from asyncloader.workers.notebook_pickling import dump_message, in_session

MAINS: dict[str, tuple[dict[str, Any], bool]] = {
    "script": ({"__file__": __file__}, False),
    "python -m": ({"__spec__": ModuleSpec("package.__main__", None)}, False),
    "zip file": ({"__file__": "no.zip/__main__.py", "__spec__": ModuleSpec("__main__", None)}, False),
    "kernel": ({}, True),
    "standard input": ({"__file__": "<stdin>"}, True),
}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty `__main__`, like a kernel's."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def define(main: ModuleType, name: str = "Row") -> Any:
    """Run a cell that defines a class."""
    exec(f"class {name}:\n    def __init__(self, number): self.number = number", vars(main))
    return vars(main)[name]


@pytest.mark.parametrize("kind", MAINS)
def test_a_session_is_a_main_module_without_a_file(kind: str, main: ModuleType) -> None:
    """Where a child can import `__main__`, by file or by name, nothing is pickled in another way."""
    attributes, session = MAINS[kind]
    vars(main).update(attributes)
    assert in_session() == session


def test_a_message_carries_what_it_names(main: ModuleType) -> None:
    """A message that names a session's class has the class; any other costs no more than in a script."""
    pytest.importorskip("cloudpickle")
    row = define(main)
    assert dump_message([row(1)]) != pickle.dumps([row(1)], 5)
    for value in ([1, 2, 3], {"rows": (4, 5)}, ["__main__"]):
        assert pickle.loads(dump_message(value)) == value
    assert dump_message([1, 2, 3]) == pickle.dumps([1, 2, 3], 5)
