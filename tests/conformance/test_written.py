"""The transport that a page of the documentation writes keeps the contract, by the test class that the page writes."""

from __future__ import annotations

import re
import sys
from types import ModuleType

from tests.docs.test_code_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "write-a-transport.md"


def texts_of_page() -> str:
    """Return the page's blocks with the transport and its tests."""
    texts = [block.text for block in blocks(PAGE.read_text()) if re.search(r"^class \w*Zip", block.text, re.MULTILINE)]
    assert len(texts) == 2
    return "\n".join(texts)


def page_module() -> ModuleType:
    """Make a module of these blocks: a transport pickles by the name of its module."""
    module = sys.modules["write_a_transport"] = ModuleType("write_a_transport")
    exec(compile(texts_of_page(), PAGE, "exec"), vars(module))
    return module


TestZip = page_module().TestZipTransport
