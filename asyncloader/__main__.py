"""``python -m asyncloader``, and the command `asyncloader`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        from asyncloader.commands.command_line import run

        return run(argv)
    except KeyboardInterrupt:  # before a command has begun, which handles it from then on
        return 130


if __name__ == "__main__":
    sys.exit(main())
