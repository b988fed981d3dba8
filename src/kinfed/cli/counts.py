"""Numbers that options count with."""

import argparse


def count(text: str) -> int:
    """A whole number from 1 on, as an option's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got '{text}'")
    return number
