"""The transport that a page of the documentation writes keeps the contract, too."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncloader.transports import Transport
from tests.conformance.transport import TransportConformance
from tests.docs.test_code_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "write-a-transport.md"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Transport]]:
    """The class of the page, in a module by which it pickles."""
    file = tmp_path_factory.mktemp("written") / "written_transport.py"
    file.write_text(blocks(PAGE.read_text())[0].text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.ZipTransport
    del sys.modules[file.stem]


class TestZip(TransportConformance):
    @pytest.fixture(autouse=True)
    def archive(self, tmp_path: Path, written: type[Transport]) -> None:
        self.kind = written
        self.file = tmp_path / "a.zip"
        zipfile.ZipFile(self.file, "w").close()

    def make(self) -> Transport:
        return self.kind.from_url(f"zip://{self.file}")

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        with zipfile.ZipFile(self.file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        new = self.file.with_suffix(".new")
        with zipfile.ZipFile(new, "w") as archive:
            for name, content in {**members, path: data}.items():
                archive.writestr(name, content)
        new.replace(self.file)
