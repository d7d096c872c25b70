"""``python -m asyncloader``, and the command `asyncloader`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns the exit code."""
    from asyncloader.service.extra import check_extra

    try:
        check_extra()
    except ImportError as error:
        print(f"asyncloader: {error}", file=sys.stderr)  # noqa: T201 - a command's own words
        return 2
    from asyncloader.service import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
