"""The script that plants bugs: its list fits the rules, and it distinguishes a killed bug from a survivor."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutants import BUGS, Bug, ListError, check, read, run

MODULE = "def double(n: int) -> int:\n    return n + n\n\n\ndef triple(n: int) -> int:\n    return 3 * n\n"
CONFTEST = "def pytest_addoption(parser):\n    parser.addoption('--ci', action='store_true')\n"
TEST = "from room.code import double\n\ndef test_double():\n    assert double(2) == 4 and double(3) == 6\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a checkout of a module and its test, with a link."""
    for name, text in (("room/code.py", MODULE), ("tests/test_code.py", TEST), ("conftest.py", CONFTEST), ("junk", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("room")
    for command in (["init", "-q"], ["add", "room", "tests", "link", "conftest.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def bug(old: str, new: str, name: str = "a bug", file: str = "room/code.py") -> Bug:
    return Bug(name, file, old, new, ("tests/test_code.py",))


@pytest.mark.thorough
def test_a_bug_is_killed_or_survives(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is planted alone, in a copy; a survivor is tried against the whole suite on request."""
    bugs = [bug("n + n", "n * n", "square"), bug("3 * n", "2 * n", "not tested"), bug("n + n", "n - n", "nothing")]
    survivors = run(bugs, tree, whole=True)
    assert [finding.bug.name for finding in survivors] == ["not tested"]
    lines = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    killed = "test_code.py::test_double"
    assert lines[:3] == [
        ["| square", "code", killed],
        ["| not tested", "code", "**survived**"],
        ["| nothing", "code", killed],
    ]
    assert lines[3] == lines[1]
    assert lines[-1] == ["2 of 3 bugs killed"]
    assert (tree / "room" / "code.py").read_text() == MODULE


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (bug("4 * n", "n"), "0 times"),
        (bug("(n: int)", "(m: int)"), "2 times"),
        (bug("return n + n", "return ("), "no Python"),
        (bug("n + n", "n", file="room/gone.py"), "no room/gone.py"),
        (bug("n + n", "n")._replace(tests=("tests/gone.py",)), "no tests/gone.py"),
        (bug("n + n", "n + n"), "changes nothing"),
    ],
)
def test_an_entry_that_does_not_fit_is_told(tree: Path, wrong: Bug, said: str) -> None:
    """A text that does not occur exactly once, a missing file, or an impossible change: before any test is run."""
    with pytest.raises(ListError, match=said):
        check([bug("n + n", "n * n", "fine"), wrong], tree)


@pytest.mark.thorough
@pytest.mark.parametrize("spoil", [lambda text: text.replace("== 4", "== 5"), lambda text: text + "import gone\n"])
def test_tests_that_fail_anyway_prove_nothing(tree: Path, spoil: Callable[[str], str]) -> None:
    """The tests must pass without a bug."""
    (tree / "tests" / "test_code.py").write_text(spoil(TEST))
    with pytest.raises(ListError, match=r"without any bug|pytest ended with"):
        run([bug("n + n", "n * n")], tree, whole=False)


def test_the_list_fits_the_code() -> None:
    """After a change of a line in which a bug is planted, its entry must be changed, too."""
    check(read(BUGS), Path(__file__).parents[1])


def test_the_list_covers_every_room() -> None:
    """The list has at least 40 bugs, and a bug in each of the rooms."""
    bugs = read(BUGS)
    assert len(bugs) >= 40
    rooms = "samplers epoch state ranks delivery shared formats remote transports workers workers.fetch workers.ipc"
    rooms += " options telemetry live loaders service.protocol service.client service.node dataloader2"
    assert {each.room for each in bugs} >= set(rooms.split())
