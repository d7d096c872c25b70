"""``python -m asyncloader``, and the command `asyncloader`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from asyncloader.commands.command_line import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
