"""Accelerate: `Accelerator.prepare` builds a stock DataLoader from the user's attributes; here it gets ours.

Accelerate's wrapper (`DataLoaderShard`) stays: it moves batches to the device, feeds the gradient state and shards the
batch sampler. Only the loader inside it is exchanged.
"""

from __future__ import annotations

from typing import Any

from accelerate import skip_first_batches as _skip_first_batches
from accelerate.data_loader import DataLoaderAdapter
from torch.utils.data import DataLoader as TorchDataLoader

from asyncloader.loader import DataLoader

__all__ = ["adopt", "prepare", "skip_first_batches"]


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """`accelerator.prepare(*objects, **options)`, in which our loaders stay ours.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: models, optimizers, loaders, schedulers.
        options: `prepare`'s own, for example ``device_placement``.

    Returns:
        What `prepare` returns: one object for one, a tuple for several, in their order.
    """
    prepared = accelerator.prepare(*objects, **options)
    for mine, theirs in zip(objects, prepared if len(objects) > 1 else (prepared,), strict=True):
        if isinstance(mine, DataLoader):
            adopt(theirs, mine)
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """`accelerate.skip_first_batches`, which builds a stock loader anew, for a prepared loader of ours."""
    inside = getattr(loader, "base_dataloader", loader)
    skipping = _skip_first_batches(loader, num_batches)
    if not isinstance(inside, DataLoader):
        return skipping
    return adopt(skipping, inside)


def adopt(prepared: Any, like: DataLoader[Any] | None = None) -> Any:
    """Exchange the loader inside one of Accelerate's wrappers by ours with the same arguments.

    Args:
        prepared: a `DataLoaderShard`, `DataLoaderDispatcher` or `SkipDataLoader`; or a plain loader, which is rebuilt.
        like: a loader of ours whose own options, and class, the new one gets. Default: our `DataLoader`, its defaults.

    Returns:
        `prepared` itself; a new loader if it was a plain one.

    Raises:
        TypeError: it is neither (on a TPU Accelerate wraps once more), or what is inside keeps a state
            (``use_stateful_dataloader=True``), which would be lost.
    """
    # `type`, here and below: the wrappers claim the class of what is inside them.
    wrapper = issubclass(type(prepared), DataLoaderAdapter)
    if not wrapper and not issubclass(type(prepared), TorchDataLoader):
        raise TypeError(
            f"adopt takes a loader, or one of Accelerate's wrappers around one, but got {type(prepared).__name__}"
        )
    if like is not None:
        _ = like._state  # it was of use, whatever becomes of it
    inside = prepared.base_dataloader if wrapper else prepared
    if isinstance(inside, DataLoader):
        return prepared
    if hasattr(inside, "state_dict"):
        raise TypeError(
            f"a {type(inside).__name__} keeps a state that this loader does not have; "
            "prepare without use_stateful_dataloader=True, or keep the stock loader"
        )
    own = {} if like is None else {"ring_bytes": like.ring_bytes, "concurrency": like.concurrency}
    ours = (DataLoader[Any] if like is None else type(like)).from_torch(inside, **own)
    if not wrapper:
        return ours
    prepared.base_dataloader = ours
    return prepared
