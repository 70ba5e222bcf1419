"""What several commands share: argument types, output, and whether ranks are still to be started."""

from __future__ import annotations

import argparse
import os

_MOST = 100_000  # of samples per problem, or problems, that a flag may ask for
_LARGEST_GIB = 4096  # of a GPU


def whole_number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number <= _MOST:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 to {_MOST:,}")
    return number


def gibibytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size <= _LARGEST_GIB:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of GiB from 1 to {_LARGEST_GIB:,}, e.g. 80")
    return size


def starts_ranks(options: argparse.Namespace) -> bool:
    return options.nproc is not None and "RANK" not in os.environ


def say(text: str) -> None:
    print(text, flush=True)
