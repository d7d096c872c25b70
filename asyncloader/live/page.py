"""Reads the page, and says which of its scripts and styles a browser may use.

Data path: none.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_bytes()
"""The page: HTML with its style and script, and nothing from elsewhere."""


def _hashes(tag: bytes) -> str:
    parts = re.findall(rb"<" + tag + rb">(.*?)</" + tag + rb">", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each).digest()).decode() for each in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hashes(b'script')}; style-src {_hashes(b'style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The header: only the page's own script and style, as they stand in the file, and its own stream."""
