"""Sphinx configuration: Markdown pages, the API from docstrings, warnings as errors (`make docs`)."""

from __future__ import annotations

from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

project = "asyncloader"
author = "the asyncloader authors"
copyright = author
release = version = installed("asyncloader")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"asyncloader {version}"
html_static_path = ["_static"]

nitpicky = False  # no inventories are downloaded, so torch's names cannot be resolved
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # as they are written, not the text of their values
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100  # a longer one has a line for each argument
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False


def setup(app: Any) -> None:
    """Write the pages for language models beside the HTML pages."""
    app.connect("build-finished", write_llms)


def write_llms(app: Any, error: Exception | None) -> None:
    """Called by Sphinx when a build has ended."""
    if error is None and app.builder.name == "html":
        from docs.llms import write

        write(Path(app.outdir))
