"""Sphinx configuration: Markdown pages, the API from docstrings, warnings as errors (`make docs`)."""

from __future__ import annotations

from importlib.metadata import version as installed

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
autodoc_typehints = "none"  # the signature of a loader has 23 arguments; the docstrings carry the types
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
