"""The program that `asyncloader try module:make_loader` runs: reads the loader, and drops its batches.

Data path: target -> [target_program] -> the loader.
"""

from __future__ import annotations

import sys

from asyncloader.loader import DataLoader
from asyncloader.options.clone import made_from
from asyncloader.options.declaration import LoaderSpec
from asyncloader.verification.target import CannotVerify, import_target, make_loader


def main(target: str) -> str | None:
    """Read the loader that a function makes, epoch for epoch. Returns why that cannot be done."""
    try:
        loader = make_loader(import_target(target), 0)
    except CannotVerify as error:
        return str(error)
    if isinstance(loader, LoaderSpec) and not isinstance(loader, DataLoader):
        loader = made_from(loader, DataLoader, {})  # an async loader is read by a sync one with its options
    while any([True for _ in loader]):
        pass
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
