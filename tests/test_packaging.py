"""The installed files: one top-level package, with every file of the tree, also from a checkout without links."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "asyncloader": "asyncloader",
    "workers": "asyncloader/workers",
    "transports": "asyncloader/transports",
}
LINKS = ("asyncloader/workers", "asyncloader/transports")


def copy_tree(target: Path) -> Path:
    """Copy the files that the build reads: building in place would leave files here, and would pick up stale files."""
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for folder in FOLDERS:
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=caches)
    return target


def build(tree: Path, out: Path, kind: str) -> Path:
    """Build a wheel or an sdist with the installed backend, so that no network is needed."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def package_files() -> set[str]:
    """Return every source file of the three folders and the dashboard, by the path that it must have in the wheel."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in {".html", ".json", ".py", ".typed"}
        if not any((ROOT / link) in path.parents for link in LINKS)
    }


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("packaging")
    return build(copy_tree(base / "tree"), base / "out", "wheel")


@pytest.mark.thorough
def test_wheel_holds_every_file_of_the_tree_and_nothing_else(wheel: Path) -> None:
    """A new file or sub-folder that the explicit package list misses would show here."""
    assert wheel_files(wheel) == package_files()


def test_wheel_installs_one_top_level_package(wheel: Path) -> None:
    """`workers` and `transports` are names that other projects use: they exist only inside asyncloader."""
    assert {name.split("/")[0] for name in wheel_files(wheel)} == {"asyncloader"}
    with zipfile.ZipFile(wheel) as archive:
        (top_level,) = (name for name in archive.namelist() if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["asyncloader"]


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    """The metadata has Python 3.11, the declared runtime dependencies, the licence and its text."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) == len(declared)
    assert next(line for line in required if line.startswith("uvloop")).endswith('sys_platform != "win32"')


@pytest.mark.thorough
def test_checkout_without_links_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Where links are off, git writes small text files instead: the build must not depend on the links."""
    tree = copy_tree(tmp_path / "tree")
    for link in LINKS:
        target = (tree / link).readlink()
        (tree / link).unlink()
        (tree / link).write_text(str(target))
    assert wheel_files(build(tree, tmp_path / "out", "wheel")) == wheel_files(wheel)


@pytest.mark.thorough
def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """The source distribution has all files from which the wheel is made."""
    sdist = build(copy_tree(tmp_path / "tree"), tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert wheel_files(build(tree, tmp_path / "out", "wheel")) == wheel_files(wheel)


def test_installed_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel alone can be imported, sub-packages included, and it brings no bare `workers`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import importlib.util, sys, asyncloader, asyncloader.workers, asyncloader.transports\n"
        "assert asyncloader.__file__.startswith(sys.argv[1]), asyncloader.__file__\n"
        "assert importlib.util.find_spec('workers') is None\n"
        "assert importlib.util.find_spec('transports') is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "site")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def replaced(wheel: Path, extras: Iterable[str]) -> set[str]:
    """Return the packages that pip would install for these extras; skips the test where no index answers."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--report",
        "-",
        "--no-input",
        "--retries",
        "1",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    wanted = f"{wheel}[{','.join(extras)}]"
    done = subprocess.run([*pip, wanted], env=environment, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode:
        probe = [*pip, "--no-deps", "--ignore-installed", "aiofiles"]
        if subprocess.run(probe, env=environment, capture_output=True, check=False, timeout=100).returncode:
            pytest.skip("no package index answers")
    assert done.returncode == 0, done.stderr
    return {each["metadata"]["name"].lower() for each in json.loads(done.stdout)["install"]}


def test_no_extra_replaces_the_installed_torch(wheel: Path) -> None:
    """Without the pins of constraints.txt, pip finds all extras' packages beside the torch that is there."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    alone = {"test-clients"}  # RecBole, in it, requires another Ray than the rest
    for group in (extras - alone, alone):
        if "torch" in replaced(wheel, sorted(group)):
            assert {extra for extra in group if "torch" in replaced(wheel, [extra])} == set()


PLAIN = {
    "starred": "from asyncloader import *; assert DataLoader is not None",
    "helped": "import asyncloader, pydoc; assert 'DataLoader' in pydoc.render_doc(asyncloader)",
    "listed": "import asyncloader, inspect; assert dict(inspect.getmembers(asyncloader))['Service'] is not None",
    "asked for its version": "import asyncloader.__main__ as a; a.main(['--version'])",
    "asked for help": "import asyncloader.__main__ as a; a.main(['serve', '--help'])",
    **{
        f"without {needed}": f"try: import asyncloader.integrations.{bridge}\n"
        f"except ImportError as error: assert 'pip install {needed}' in str(error)\nelse: raise AssertionError"
        for bridge, needed in (("prometheus", "prometheus-client"), ("opentelemetry", "opentelemetry-api"))
    },
}
EACH_IN_A_FORK = """
import os, sys, torch
sys.modules.update(dict.fromkeys({missing}))
failed = []
for name, way in {ways}.items():
    if not (child := os.fork()):
        break
    if os.waitpid(child, 0)[1]:
        failed.append(name)
else:
    sys.exit(", ".join(failed) or 0)
exec(way)
"""
# typing_extensions comes with torch
RUNTIME = {"asyncloader", "torch", "numpy", "uvloop", "aiofiles", "typing_extensions"}


def test_a_plain_install_needs_no_extra() -> None:
    """Whatever a user does first, no package is imported that only an extra installs."""
    trees = [ast.parse(path.read_text()) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    extras = {name.partition(".")[0] for name in names} - RUNTIME - sys.stdlib_module_names
    assert {"msgspec", "aiohttp", "obstore"} <= extras
    program = EACH_IN_A_FORK.format(missing=sorted(extras), ways=PLAIN)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_of_the_checkout_point_at_the_two_folders() -> None:
    """Type checkers and an uninstalled checkout find the sub-packages through the links."""
    if not (ROOT / LINKS[0]).is_symlink():
        pytest.skip("this checkout has no symbolic links")
    for link in LINKS:
        assert str((ROOT / link).readlink()) == f"../{Path(link).name}"
