"""States that earlier versions saved: a loader of this version gives the batches that came next then."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncloader import StateError
from tests.states.__main__ import main
from tests.states.files import make_files
from tests.states.record import FOLDER, KINDS, resumed, values_of

REMOVED: dict[str, tuple[str, Callable[[Path], Any], str]] = {}
"""Kinds that were removed: the reason, a loader that a state is given to instead, and words of its error."""

FILES = sorted(FOLDER.glob("20*/*.json"))

pytestmark = pytest.mark.filterwarnings("ignore")  # some loaders warn; what they give counts here


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the kinds' files."""
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}-{path.stem}" for path in FILES])
def test_what_came_next_comes_next(path: Path, files: Path) -> None:
    """After each state of each kind; or the kind was removed, and the error says so."""
    for moment, saved in values_of(path.read_text()).items():
        if path.stem in REMOVED:
            _, make, words = REMOVED[path.stem]
            with pytest.raises(StateError, match=words):
                make(files).load_state_dict(saved["state"])
            continue
        kind = KINDS[path.stem]
        if find_spec(kind.needs) is None:  # not imported: a process that has used Lance cannot fork
            pytest.skip(f"{kind.needs} is not installed")
        expected = {"rest": saved["rest"], "next": saved["next"]}
        assert resumed(kind, files, saved) == expected, moment


def test_each_kind_is_recorded() -> None:
    """In the newest folder; what was recorded is a kind, or was removed for a reason."""
    newest = max(path.parent for path in FILES)
    assert {path.stem for path in FILES if path.parent == newest} == KINDS.keys()
    assert {path.stem for path in FILES} == KINDS.keys() | REMOVED.keys()
    assert not KINDS.keys() & REMOVED.keys()


def test_what_is_recorded_is_never_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program refuses the name of a folder that exists."""
    monkeypatch.setattr("tests.states.record.FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["states", "--write", "2026"])
    (tmp_path / "2026").mkdir()
    assert main() == 1
    assert not [*(tmp_path / "2026").iterdir()]
