"""Numbers of the command line, checked where argparse reads them."""

import argparse
import re


def positive(text: str) -> int:
    """Return a whole number from 1. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, must be a whole number from 1")
    return int(text)


def duration_s(text: str) -> float:
    """Return a duration such as 90s, 5m or 1h30m in seconds; a number alone is seconds. Raises ArgumentTypeError."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([hms]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"found {text!r}, must be a time such as 90s, 5m or 1h30m")
    return sum(float(number) * units[unit or "s"] for number, unit in parts)
