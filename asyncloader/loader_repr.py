"""Shows a loader in one line, for `repr`, and as a small table, for notebooks.

Data path: none. Nothing of the user's is called: neither the dataset's `repr` nor its length.
"""

from __future__ import annotations

import html
from typing import Any

from torch.utils.data import BatchSampler

from asyncloader.options import LoaderSpec, is_iterable
from asyncloader.samplers.distributed import plain_sampler

__all__ = ["as_html", "as_text"]


def as_text(name: str, spec: LoaderSpec[Any], place: str) -> str:
    """One line: `name` of the class, the options that matter most, and the loader's `place` in its epochs."""
    parts = _parts(spec)
    options = ", ".join(f"{key}={value}" for key, value in parts.items() if key != "dataset")
    return f"<{name} of {parts['dataset']}: {options}; {place}>"


def as_html(name: str, spec: LoaderSpec[Any], place: str) -> str:
    """The same as a table."""
    cells = {**_parts(spec), "stands": place}
    rows = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in cells.items())
    return f"<table><caption>{html.escape(name)}</caption>{rows}</table>"


def _parts(spec: LoaderSpec[Any]) -> dict[str, str]:
    parts = {"dataset": type(spec.dataset).__name__, "batch_size": str(spec.batch_size)}
    if type(spec.batch_sampler) not in (BatchSampler, type(None)):
        parts["batch_sampler"] = type(spec.batch_sampler).__name__
    elif not is_iterable(spec):
        parts["sampler"] = type(plain_sampler(spec)).__name__
    seed = spec._asyncloader_options.seed
    return {**parts, "num_workers": str(spec.num_workers), "seed": str(seed)}
