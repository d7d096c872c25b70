"""The Makefile's targets: each is in the help, and can be made, as far as a dry run shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.targets import CUT_SHORT, LEFT_OUT, targets

ROOT = Path(__file__).parent.parent
MAKE = shutil.which("make")
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):(?: .*)?## ", (ROOT / "Makefile").read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Copy a clone's files that make reads, with nothing installed: the stamps and the environment do not exist."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> str:
    """Run make with the system's programs on its path, and no variable of this environment. Returns its output."""
    assert MAKE is not None
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    ran = subprocess.run([MAKE, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_help_lists_every_target(fresh: Path) -> None:
    """It lists all phony targets; plain `make` prints it."""
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^  make ([\w-]+) ", make(fresh, "help"), re.MULTILINE)
    assert sorted(listed) == sorted(" ".join(phony).split()) == sorted(TARGETS)
    assert make(fresh) == make(fresh, "help")


@pytest.mark.parametrize("target", TARGETS)
def test_the_target_can_be_made(target: str, fresh: Path) -> None:
    """In a fresh clone it makes the environment first, and then runs programs and files that exist."""
    text = make(fresh, "--dry-run", target)
    commands = text.replace("\\\n", " ").splitlines()
    if target not in LEFT_OUT:
        created = next(number for number, line in enumerate(commands) if "-m venv .venv" in line)
        runs = (number for number, line in enumerate(commands) if re.match(r"(?:\w+=\S+ )*\.venv[\w-]*/bin/", line))
        assert created < next(runs), "nothing runs in an environment that does not exist yet"
    for path in re.findall(r"(?<=\s)((?:docs|tests)(?:/[\w./-]+)?)(?=\s|$)", "\n".join(commands)):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m ((?:tests|docs)[\w.]*)", text):
        found = ROOT / module.replace(".", "/")
        assert (found / "__main__.py").is_file() or found.with_suffix(".py").is_file(), module
    for extras in re.findall(r"-e '\.\[([^\]]*)\]'", text):
        assert set(extras.split(",")) <= declared()[0], extras
    assert set(re.findall(r"--group (\S+)", text)) <= declared()[1]


def test_every_stamp_says_what_it_installs() -> None:
    """A target with a stamp names extras or a group, which exist, and each group is a target's."""
    text = (ROOT / "Makefile").read_text()
    extras, groups = (
        dict(re.findall(rf"^\$\(VENV\)/\.stamp-([\w-]+): {name} := (\S+)$", text, re.MULTILINE))
        for name in ("EXTRAS", "GROUP")
    )
    assert extras.keys() | groups.keys() == set(re.findall(r"^[\w-]+:.*\.stamp-([\w-]+)", text, re.MULTILINE))
    assert {name for each in extras.values() for name in each.split(",")} <= declared()[0]
    assert set(groups.values()) == declared()[1]


def declared() -> tuple[set[str], set[str]]:
    """Return the extras and the dependency groups."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return set(project["project"]["optional-dependencies"]), set(project["dependency-groups"])


def test_pages_name_targets_that_exist() -> None:
    """These are the commands for readers, in a line of their own or between backquotes."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {page: re.findall(r"(?:^ {4}|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE) for page in pages}
    assert {page: targets for page, targets in named.items() if not {*targets} <= {*TARGETS}} == {}
    assert sum(map(len, named.values())) > 10


def test_every_target_is_made_in_an_empty_environment() -> None:
    """`make targets` makes all that install something; those that install the same in one environment."""
    assert targets().keys() == {*TARGETS} - LEFT_OUT
    assert CUT_SHORT.keys() <= targets().keys()
    assert targets()["check"] == targets()["format"] != targets()["docs"]
