"""The ratio of prefill to decode engines, against every pair of counts within the bounds."""

import itertools
from fractions import Fraction

import pytest

from tests.support.specimens import report, role

RATIOS = ["1:3", "1:2", "2:3", "1:1", "3:2", "3:1"]
COUNTS = [(1, 1), (2, 2), (5, 5), (1, 3), (2, 5), (4, 7)]


def counts(name, low, high):
    if low == high:
        return role(name, replicas=low, scaling=None)
    return role(name, replicas=None, scaling={"minReplicas": low, "maxReplicas": high})


def fraction(ratio):
    prefill, decode = map(int, ratio.split(":"))
    return Fraction(prefill, decode)


def is_refused(ratio, prefill, decode):
    found = report({"spec": {"ratio": ratio}}, counts("prefill", *prefill), counts("decode", *decode)).violations
    assert {finding.rule for finding in found} <= {"ratio-achievable"}
    return bool(found)


@pytest.mark.parametrize("prefill", COUNTS)
def test_a_ratio_is_refused_exactly_when_no_numbers_of_engines_meet_it(prefill):
    for decode, low, high in itertools.product(COUNTS, [None, *RATIOS], [None, *RATIOS]):
        ratio = {key: value for key, value in (("min", low), ("max", high)) if value is not None}
        met = any(
            (low is None or fraction(low) <= Fraction(p, d)) and (high is None or Fraction(p, d) <= fraction(high))
            for p in range(prefill[0], prefill[1] + 1)
            for d in range(decode[0], decode[1] + 1)
        )
        assert is_refused(ratio, prefill, decode) != met, (decode, ratio)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_role_that_is_scaled_to_zero_has_no_ratio(name):
    assert not is_refused({"min": "3:1"}, *((0, 0) if each == name else (1, 1) for each in ("prefill", "decode")))
