"""Writes a set of states: `python -m tests.states --write NAME`."""

from __future__ import annotations

import argparse
import sys
import warnings

from tests.states.record import write


def main() -> int:
    """Write the states of all kinds to a new folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.states", description=main.__doc__)
    parser.add_argument("--write", metavar="NAME", required=True, help="the folder's name: today's date")
    warnings.simplefilter("ignore")
    try:
        write(parser.parse_args().write)
    except FileExistsError as error:
        print(f"{error.filename} exists, and its states are never overwritten: choose another name")  # noqa: T201 - a program's own words
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
