from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncloader.transports import (
    LocalTransport,
    TransportError,
    UnknownScheme,
    known_schemes,
    open_transport,
)

MODULE = """
from asyncloader.transports import MemoryTransport

class Gopher(MemoryTransport):
    @classmethod
    def from_url(cls, url, **options):
        made = cls(**options)
        made.url = url
        return made

not_a_class = Gopher()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with entry points where Python looks for installed packages."""

    def install(package: str, **schemes: str) -> None:
        place = tmp_path / package
        info = place / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{scheme} = {value}" for scheme, value in schemes.items()]
        (info / "entry_points.txt").write_text("\n".join(["[asyncloader.transports]", *lines]))
        (place / f"{package}_module.py").write_text(MODULE)
        monkeypatch.syspath_prepend(place)
        monkeypatch.delitem(sys.modules, f"{package}_module", raising=False)

    return install


@pytest.mark.parametrize("url", ["data/set", "file:///data/set", "FILE:///data/set", Path("data/set"), "a:b", "c:\\x"])
def test_files(url: str | Path) -> None:
    """A file URL, a plain path and a Path object mean a local directory; so does a name with a colon."""
    assert isinstance(open_transport(url), LocalTransport)


def test_unknown_scheme_lists_what_is_known(install: Install) -> None:
    """The error has the scheme and the known schemes with their packages, not the URL and its password."""
    install("gopherpack", gopher="gopherpack_module:Gopher")
    with pytest.raises(UnknownScheme) as caught:
        open_transport("ftp://user:secret@host/data")
    text = str(caught.value)
    assert text.startswith("no transport serves the scheme 'ftp'")
    assert "file, gopher (gopherpack), gs, hf, http, https, memory, s3, s3a" in text
    assert "asyncloader.transports" in text
    assert "secret" not in text


def test_an_installed_package_adds_a_scheme(install: Install) -> None:
    """An entry point is found by its scheme, in any letter case, and gets URL and options."""
    install("gopherpack", gopher="gopherpack_module:Gopher")
    transport = open_transport("GOPHER://hole/1", objects={"a": b"1"})
    assert type(transport).__name__ == "Gopher"
    assert vars(transport)["url"] == "GOPHER://hole/1"
    assert "objects=1" in repr(transport)
    assert known_schemes()["gopher"] == "gopherpack"


def test_built_in_schemes_stay_ours(install: Install) -> None:
    """A package cannot change the meaning of file://."""
    install("thief", file="thief_module:Gopher")
    assert isinstance(open_transport("file:///data"), LocalTransport)
    assert known_schemes()["file"] == "asyncloader"


def test_two_packages_for_one_scheme(install: Install) -> None:
    """A choice would depend on the search path, so neither package is used."""
    install("one", gopher="one_module:Gopher")
    install("two", gopher="two_module:Gopher")
    with pytest.raises(TransportError, match=r"more than one package serves the scheme 'gopher': one .*, two "):
        open_transport("gopher://hole")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("no_such_module:Gopher", "which cannot be loaded: No module named 'no_such_module'"),
        ("broken_module:Missing", "which cannot be loaded: .*Missing"),
        ("broken_module:not_a_class", "which is not a subclass of asyncloader.transports.Transport"),
    ],
)
def test_broken_package(install: Install, value: str, text: str) -> None:
    """The error names the unusable package and the reason."""
    install("broken", gopher=value)
    with pytest.raises(TransportError, match=rf"package 'broken', {text}"):
        open_transport("gopher://hole")


def test_importing_the_package_does_not_import_the_transports() -> None:
    """A scheme's module is imported when it is used; the names exist nevertheless."""
    program = (
        "import sys, asyncloader.transports as t\n"
        "assert 'asyncloader.transports.local' not in sys.modules\n"
        "assert all(hasattr(t, name) for name in t.__all__)\n"
        "assert t.LocalTransport.__module__ == 'asyncloader.transports.local'\n"
        "assert t.MemoryTransport.__module__ == 'asyncloader.transports.memory'\n"
        "assert not hasattr(t, 'Missing')\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
