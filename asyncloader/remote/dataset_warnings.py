"""Warns of arguments of `RemoteIterableDataset` without an effect, and of samples that ranks leave out.

Data path: beside the dataset.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from asyncloader.errors import NoEffectWarning
from asyncloader.remote.stores import is_cached
from asyncloader.sizes import Size

_log = logging.getLogger("asyncloader")

_LEFT_OUT = 0.02  # the part of the data that an epoch leaves out from which a warning is logged


def warn_without_effect(urls: Any, cache_dir: Any, cache_bytes: Size | None, cache_revalidate: bool) -> None:
    """Warn of cache arguments without an effect, at the line that makes the dataset."""
    if cache_dir is None:
        given = {"cache_bytes": cache_bytes is not None, "cache_revalidate": not cache_revalidate}
        for name in (name for name, set_ in given.items() if set_):
            warnings.warn(f"{name}= does nothing without cache_dir=", NoEffectWarning, stacklevel=3)
    elif not any(is_cached(os.fspath(url)) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)):
        warnings.warn("cache_dir= does nothing for local files, which are not cached", NoEffectWarning, stacklevel=3)


def log_left_out(part: float, shards: int, ranks: int) -> None:
    """Warn of the part of the samples that an epoch leaves out, if it is large."""
    if part >= _LEFT_OUT:
        _log.warning(
            "%d ranks share %d shards unevenly: an epoch ends for all with the smallest share, so each epoch leaves "
            "out about %.0f%% of the samples (on_uneven='drop'), other ones each time. With streams= of the dataset "
            "and seed= of the loader none is left out",
            ranks,
            shards,
            100 * part,
        )
