"""Sets ``num_workers="auto"`` on a loader that has been made, as torch lets a user set the number until it is iterated.

Data path: none.
"""

from __future__ import annotations

from typing import Any

from asyncloader.options.auto_workers import AUTO, AutoWorkers, check_auto
from asyncloader.options.declaration import LoaderSpec, is_iterable, makes_threads


def set_later(loader: LoaderSpec[Any], value: Any) -> Any:
    """Return the value for the loader's `num_workers`: "auto" becomes a choice of the loader's own.

    Raises:
        ValueError: the batches depend on the number, or it is not the loader's to choose, as in the constructor.
    """
    known = vars(loader)
    if not isinstance(value, str) or value != AUTO or known["num_workers"] is value:
        return value
    given = vars(loader._asyncloader_options) | {
        name: getattr(loader, name) for name in ("dataset", "batch_size", "batch_sampler")
    }
    check_auto(given, iterable=is_iterable(loader), makes_threads=makes_threads(loader.multiprocessing_context))
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2  # torch's default with workers
    return AutoWorkers()  # not another loader's
