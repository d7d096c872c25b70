"""Sets "auto" on a loader that has been made, as torch lets a user set its options until it is iterated.

Data path: none.
"""

from __future__ import annotations

from typing import Any

from asyncloader.options.auto_prefetch import AutoPrefetch, check_auto_prefetch
from asyncloader.options.auto_value import AUTO
from asyncloader.options.auto_workers import AutoWorkers, check_auto
from asyncloader.options.declaration import LoaderSpec, is_iterable, makes_threads

SETTABLE = ("num_workers", "prefetch_factor")
"""torch's options that may be "auto"."""


def set_later(loader: LoaderSpec[Any], name: str, value: Any) -> Any:
    """Return the value for an option of the loader: "auto" becomes a choice of the loader's own.

    Args:
        loader: was made.
        name: one of `SETTABLE`.
        value: from the user.

    Raises:
        ValueError: the batches depend on the number, or it is not the loader's to choose, as in the constructor.
    """
    known = vars(loader)
    if not isinstance(value, str) or value != AUTO or known[name] is value:
        return value
    if name == "prefetch_factor":
        threads = makes_threads(loader.multiprocessing_context)
        check_auto_prefetch(vars(loader._asyncloader_options), makes_threads=threads)
        return AutoPrefetch()  # not another loader's
    given = vars(loader._asyncloader_options) | {
        name: getattr(loader, name) for name in ("dataset", "batch_size", "batch_sampler")
    }
    check_auto(given, iterable=is_iterable(loader), makes_threads=makes_threads(loader.multiprocessing_context))
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2  # torch's default with workers
    return AutoWorkers()  # not another loader's
