"""What the text of a flag's value means to vLLM: its converters (`vllm/engine/arg_utils.py`, `argparse_utils.py`)."""

import json
import re
from typing import Any

from dcp_operator.flags.table import FlagSpec

#: Multipliers of vLLM's `human_readable_int`: small letters are decimal, capitals binary.
_DECIMAL = {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
_BINARY = {letter: 1024**power for power, letter in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SIZE_IN_JSON = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
#: A text in quotes, or one without its end: outside of quotes there may be sizes such as 80m. Possessive and up to the
#: end, so that no input makes it try again.
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*+(?:"|\\?\Z))', re.DOTALL)

#: What vLLM reads as "choose yourself".
AUTO = "auto"

Value = int | float | str


class BadValueError(ValueError):
    """A value that vLLM can't read; the message says what the flag takes."""


def convert(spec: FlagSpec, text: str) -> Value:
    """Return one value of a flag: a number for numbers, "auto" for its other spellings, the text for all else.

    Raises BadValueError for a text with which vLLM would end at start-up.
    """
    if spec.optional and text in ("", "None"):
        return text
    value: Value = text
    match spec.kind:
        case "int":
            value = _integer(text)
        case "float":
            value = _float(text)
        case "size":
            value = size(text)
        case "size-or-auto":
            value = AUTO if text.strip() == "-1" or text.strip().lower() == AUTO else size(text)
        case "name":
            value = text.lower().replace("-", "_")
        case "json":
            _json(text)
        case "config":
            if not isinstance(_json(_expanded(text)), dict):
                raise BadValueError("must be a JSON object")
        case "json-or-text" if len(text.strip()) > 1 and text.strip().startswith("{") and text.strip().endswith("}"):
            _json(text)
        case _:
            pass
    if spec.choices and value not in spec.choices:
        raise BadValueError(f"must be one of {', '.join(map(str, spec.choices))}")
    return value


def size(text: str) -> int:
    """Return a number that may end in a multiplier: 8k is 8000, 8K is 8192, 25.6k is 25600.

    Decimals are multiplied as floating-point numbers and cut off, as vLLM does it: 1.001k is 1000.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return _integer(text, "must be a whole number, or one such as 32k or 1M")
    number, letter = match.groups()
    try:
        if letter in _DECIMAL:
            return int(float(number) * _DECIMAL[letter])
        return int(number) * _BINARY[letter]
    except OverflowError as error:
        raise BadValueError("is larger than any number that vLLM can read") from error
    except ValueError as error:
        raise BadValueError(
            f"must be a whole number before {letter}; {number[:40]}{letter.lower()} takes decimals"
        ) from error


def _integer(text: str, wanted: str = "must be a whole number") -> int:
    try:
        return int(text)
    except ValueError as error:
        raise BadValueError(wanted) from error


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BadValueError("must be a number") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadValueError(f"must be JSON; at character {error.pos + 1}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise BadValueError("must be JSON with numbers and depths that Python can read") from error


def _expanded(text: str) -> str:
    """Return JSON with the sizes that vLLM takes outside of quotes written out."""
    parts = _QUOTED.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = _SIZE_IN_JSON.sub(lambda match: str(size(match.group())), parts[index])
    return "".join(parts)
