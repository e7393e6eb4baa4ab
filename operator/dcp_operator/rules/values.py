"""What a flag's value means: numbers as vLLM reads them, switches, and names of number formats."""

import re
from decimal import Decimal

from dcp_operator.flags import Flag

#: Multipliers of vLLM's `human_readable_int`: small letters are decimal, capitals binary.
_MULTIPLIERS = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+(?:_\d+)*", re.ASCII)

#: Names for one number format -> the name that stands for them.
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_KV_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}

#: What vLLM reads as "choose yourself".
AUTO = "auto"


class BadValueError(ValueError):
    """A value that vLLM can't read; the message says what the flag takes."""


def flag_value(flag: Flag) -> int | bool | str:
    """Return the value of a flag: an int for numbers, a bool for switches, the text otherwise.

    Raises BadValueError for a number that vLLM would not take as one.
    """
    if flag.kind == "bool":
        return not flag.negated
    if flag.kind == "int" and len(flag.values) == 1:
        return _integer(flag.value)
    if flag.kind in ("size", "size-or-auto"):
        text = flag.value.strip()
        if flag.kind == "size-or-auto" and (text == "-1" or text.lower() == AUTO):
            return AUTO
        return _size(text)
    return flag.value


def same_value(name: str, said: object, stated: object) -> bool:
    """Whether a flag says the same as a field, other names for the same format included."""
    if name == "--dtype":
        return dtype(str(said)) == dtype(str(stated))
    if name == "--kv-cache-dtype":
        return kv_cache_dtype(str(said)) == kv_cache_dtype(str(stated))
    return said == stated


def dtype(name: str | None) -> str:
    """Return the one name of a data type; absent means auto."""
    return _DTYPE_ALIASES.get(name or AUTO, name or AUTO)


def kv_cache_dtype(name: str | None) -> str:
    """Return the one name of a KV-cache data type; absent means auto."""
    return _KV_DTYPE_ALIASES.get(name or AUTO, name or AUTO)


def written(flag: Flag, *, full: bool = False) -> str:
    """Return a flag as the user wrote it, with its full name where it was abbreviated."""
    plain = flag.spelling.replace("_", "-")
    if plain in (flag.name, f"--no-{flag.name[2:]}") or (not full and plain.startswith(f"{flag.name}.")):
        return flag.spelling
    return f"{flag.spelling} ({flag.name})"


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise BadValueError("must be a whole number")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        if not _INTEGER.fullmatch(text):
            raise BadValueError("must be a whole number, or one such as 32k or 1M")
        return int(text)
    number, letter = match.groups()
    if letter.isupper() and "." in number:
        raise BadValueError(f"must be a whole number before {letter}; {number}{letter.lower()} takes decimals")
    return int(Decimal(number) * _MULTIPLIERS[letter])
