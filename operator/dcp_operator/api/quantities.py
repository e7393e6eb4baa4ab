"""Kubernetes quantities: `500m`, `16Gi`, `1e3`, as exact numbers.

The grammar is that of `k8s.io/apimachinery/pkg/api/resource`: a signed decimal number with one suffix, binary
(Ki Mi Gi Ti Pi Ei), decimal (n u m k M G T P E) or a decimal exponent (e3, E-2).
"""

import re
from decimal import Decimal

_SUFFIXES: dict[str, Decimal] = {
    "": Decimal(1),
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Decimal(1000) ** -power for power, suffix in enumerate(("m", "u", "n"), start=1)},
}
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,3})|([A-Za-z]{0,2}))", re.ASCII)
#: Longer numbers are typing errors, and exact arithmetic on them costs time.
_MAX_CHARACTERS = 64


class QuantityError(ValueError):
    """A text that is no quantity; the message says what was found and what would be one."""


def parse_quantity(value: object) -> Decimal:
    """Return the exact value of a quantity, given as a string or, as YAML may have it, as a number.

    Raises `QuantityError` for everything else, with the known suffixes in the message.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise QuantityError("must be a quantity such as 500m, 4 or 16Gi")
    text = str(value)
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        raise QuantityError(f"must be a quantity such as 500m, 4 or 16Gi, a number and one of {_known_suffixes()}")
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Decimal(number).scaleb(int(exponent))
    if suffix not in _SUFFIXES:
        raise QuantityError(f"has the unknown unit {suffix}; known ones are {_known_suffixes()}")
    return Decimal(number) * _SUFFIXES[suffix]


def parse_count(value: object) -> int:
    """Return a quantity that counts whole things, such as accelerators.

    Raises `QuantityError` if it is no quantity, negative or not whole.
    """
    amount = parse_quantity(value)
    if amount < 0 or amount != amount.to_integral_value():
        raise QuantityError("must be a whole number of 0 or more")
    return int(amount)


def _known_suffixes() -> str:
    return ", ".join(suffix for suffix in _SUFFIXES if suffix)
