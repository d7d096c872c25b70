"""Keeps a loader whose remote dataset is unknown, and asks the service about it once that is needed.

Data path: options -> [unknown_dataset] -> plan.

The constructor of a loader with `workers=` does not wait for the network. It makes the loader as that of a map dataset,
which checks the arguments that must be right for any dataset. Then it takes the attributes that depend on the dataset
out of the instance. The first read of such an attribute, as in `iter()` and `len()`, asks a node and makes the loader
again. Other loaders have the attributes in the instance, where Python finds them without a call of ours.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncloader.options.checks import warn_only_of

if TYPE_CHECKING:
    from asyncloader.options.declaration import LoaderSpec

DEPENDING = ("dataset", "sampler", "batch_sampler", "_dataset_kind")
"""Attributes that torch's constructor sets according to the dataset's kind."""


class Unknown(NamedTuple):
    """The means to make a loader again once its dataset is known.

    Attributes:
        arguments: the constructor's.
        attributes: those that depend on the dataset, as torch's constructor made them for a map dataset.
    """

    arguments: dict[str, Any]
    attributes: dict[str, Any]


class AskedAttribute:
    """An attribute of the loader's class, which Python reads while the instance has none of that name.

    Args:
        name: its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, spec: LoaderSpec[Any] | None, owner: type | None = None) -> Any:
        if spec is None:
            return self
        ask_dataset(spec)
        try:
            return vars(spec)[self._name]
        except KeyError:  # torch's constructor has not come that far
            raise AttributeError(f"{type(spec).__name__!r} object has no attribute {self._name!r}") from None


def ask_dataset(spec: LoaderSpec[Any]) -> None:
    """Ask a service's node about the loader's dataset, unless that has been done, or the dataset is in this process.

    Checks the arguments that depend on the dataset. Blocks. After an error the next call asks again.

    Raises:
        ServiceUnavailable: no node could be asked in time.
        ValueError, TypeError: arguments that do not fit the dataset, as a constructor raises them.
    """
    unknown: Unknown | None = vars(spec).get("_asyncloader_unknown")
    if unknown is None:
        return
    from asyncloader.options.declaration import LoaderSpec

    # Another loader: if the arguments do not fit the dataset, this loader stays as it was, and can be asked again.
    known = LoaderSpec.__new__(LoaderSpec)
    with warn_only_of(()):  # the constructor has warned
        known._asyncloader_make({**unknown.arguments, "dataset": unknown.attributes["dataset"].ask()})
    # Another thread may have asked at the same time, and have begun an epoch of the dataset that it has set.
    if "_asyncloader_unknown" in vars(spec):
        vars(spec).update({name: vars(known)[name] for name in DEPENDING})
        # Last: once it is missing, other threads read the attributes.
        vars(spec).pop("_asyncloader_unknown", None)


def without_asking(spec: LoaderSpec[Any]) -> LoaderSpec[Any]:
    """The loader; while its dataset is unknown, a copy that has the attributes of a map dataset, and asks no node."""
    unknown: Unknown | None = vars(spec).get("_asyncloader_unknown")
    if unknown is None:
        return spec
    spec = copy.copy(spec)
    del vars(spec)["_asyncloader_unknown"]
    vars(spec).update(unknown.attributes)
    return spec
