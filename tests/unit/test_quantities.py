"""Kubernetes quantities."""

from decimal import Decimal

import pytest

from dcp_operator.api.quantities import QuantityError, parse_count, parse_quantity

VALUES = {
    "1": 1,
    "0": 0,
    "+4": 4,
    "-1": -1,
    "500m": Decimal("0.5"),
    "1.5": Decimal("1.5"),
    ".5": Decimal("0.5"),
    "5.": 5,
    "1Ki": 1024,
    "1.5Gi": 1610612736,
    "2Ei": 2 * 1024**6,
    "1k": 1000,
    "3M": 3_000_000,
    "1E": 10**18,
    "1e3": 1000,
    "1E3": 1000,
    "2e-3": Decimal("0.002"),
    "1n": Decimal("1e-9"),
    "3u": Decimal("3e-6"),
}


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_reads(text, value):
    assert parse_quantity(text) == value


def test_reads_the_numbers_that_yaml_makes():
    assert parse_quantity(4) == 4
    assert parse_quantity(0.5) == Decimal("0.5")


@pytest.mark.parametrize(
    "value",
    ["", " 1", "1 Gi", "16GB", "1K", "1gi", "1e", "e3", "--1", "1.2.3", "0x10", "\u0661", "1" * 70, "1e9999", "NaN"],
)
def test_refuses_in_words(value):
    with pytest.raises(QuantityError, match=r"^(must be a quantity such as|has the unknown unit)"):
        parse_quantity(value)


@pytest.mark.parametrize("value", [None, True, [], {}, float("nan"), float("inf")])
def test_refuses_other_types(value):
    with pytest.raises(QuantityError):
        parse_quantity(value)


def test_counts_are_whole():
    assert parse_count("8") == 8
    assert parse_count("8000m") == 8
    for value in ("7.5", "-1", "x"):
        with pytest.raises(QuantityError):
            parse_count(value)
