"""``python -m asyncloader``, and the command `asyncloader`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from asyncloader.service.extra import check_extra
    from asyncloader.service.node.command import parser

    flags = vars(parser().parse_args(argv))
    flags.pop("command")
    try:
        check_extra()
    except ImportError as error:
        print(f"asyncloader: {error}", file=sys.stderr)  # noqa: T201 - a command's own words
        return 2
    from asyncloader.service.node import cli

    return cli.run(flags)


if __name__ == "__main__":
    sys.exit(main())
