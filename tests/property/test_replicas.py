"""How many engines each role gets, beside a search through all numbers that are allowed."""

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from dcp_operator.replicas import Bound, meets_ratio, wanted
from dcp_operator.settings import Role
from tests.support.objects import spec as object_spec
from tests.support.specimens import loaded

MOST = 9
counts = st.integers(0, MOST)
ratios = st.tuples(st.integers(1, 5), st.integers(1, 5))


@st.composite
def roles(draw: st.DrawFn) -> tuple[dict, int, int]:
    """Return the fields of a role that say how many, and the least and most that they allow."""
    if draw(st.booleans()):
        count = draw(counts)
        return {"replicas": count}, count, count
    low = draw(counts)
    high = draw(st.integers(max(low, 1), MOST))
    return {"replicas": None, "scaling": {"minReplicas": low, "maxReplicas": high}}, low, high


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, str] | None:
    """Return a ratio: none, one bound, or two in their order."""
    kind = draw(st.sampled_from(("none", "min", "max", "both")))
    if kind == "none":
        return None
    low, high = sorted(draw(st.tuples(ratios, ratios)), key=lambda pair: pair[0] / pair[1])
    words = {"min": f"{low[0]}:{low[1]}", "max": f"{high[0]}:{high[1]}"}
    return words if kind == "both" else {kind: words[kind]}


def spec_with(prefill: dict, decode: dict, ratio: dict | None):
    base = object_spec()
    for role, fields in (("prefill", prefill), ("decode", decode)):
        kept = {key: value for key, value in base[role].items() if key not in ("replicas", "scaling")}
        base[role] = {**kept, **fields}
    return loaded({"spec": {**base, **({"ratio": ratio} if ratio else {})}}).spec


def judge(spec, prefill, decode, p_asked, d_asked) -> str:
    """Compare with a search through all numbers; return which case it was."""
    found = wanted(spec, {Role.PREFILL: p_asked, Role.DECODE: d_asked})
    (_, p_low, p_high), (_, d_low, d_high) = prefill, decode
    p, d = max(p_low, min(p_asked, p_high)), max(d_low, min(d_asked, d_high))
    got = (found.prefill.replicas, found.decode.replicas)
    assert p_low <= got[0] <= p_high
    assert d_low <= got[1] <= d_high
    if spec.ratio is None or p == 0 or d == 0:
        assert got == (p, d)
        return "free"
    assert min(got) > 0, "a ratio takes no role away"
    legal = [
        (a, b)
        for a in range(max(p_low, 1), p_high + 1)
        for b in range(max(d_low, 1), d_high + 1)
        if meets_ratio(spec.ratio, a, b)
    ]
    below = [(a, b) for a, b in legal if a <= p and b <= d]
    if below:
        assert got == (max(a for a, _ in below), max(b for _, b in below)), "lowered as little as possible"
        return "lowered"
    if legal:
        assert got == (min(a for a, _ in legal), min(b for _, b in legal)), "raised as little as possible"
        return "raised"
    return "out of reach"


@given(roles(), roles(), bounds(), st.integers(0, 12), st.integers(0, 12))
def test_it_is_what_a_search_through_all_allowed_numbers_finds(prefill, decode, ratio, p_asked, d_asked):
    judge(spec_with(prefill[0], decode[0], ratio), prefill, decode, p_asked, d_asked)


def test_it_is_so_for_all_small_numbers():
    """Raising is rare among random numbers, so all small ones are tried."""
    fixed = [({"replicas": count}, count, count) for count in range(5)]
    scaled = [
        ({"replicas": None, "scaling": {"minReplicas": low, "maxReplicas": high}}, low, high)
        for high in range(1, 5)
        for low in range(high)
    ]
    ratios_tried = ({"max": "1:1"}, {"min": "2:1"}, {"min": "1:2", "max": "2:3"})
    plain = spec_with({"replicas": 1}, {"replicas": 1}, None)
    made = {index: spec_with(each[0], each[0], None) for index, each in enumerate([*fixed, *scaled])}
    cases: Counter[str] = Counter()
    for ratio in ratios_tried:
        with_ratio = spec_with({"replicas": 1}, {"replicas": 1}, ratio).ratio
        for one, prefill in enumerate([*fixed, *scaled]):
            for two, decode in enumerate([*fixed, *scaled]):
                spec = plain.model_copy(
                    update={"prefill": made[one].prefill, "decode": made[two].decode, "ratio": with_ratio}
                )
                for p_asked, d_asked in product(range(5), repeat=2):
                    cases[judge(spec, prefill, decode, p_asked, d_asked)] += 1
    assert min(cases[case] for case in ("free", "lowered", "raised", "out of reach")) > 300


@given(roles(), roles(), bounds(), st.integers(0, 12), st.integers(0, 12))
def test_what_is_said_fits_what_is_done(prefill, decode, ratio, p_asked, d_asked):
    spec = spec_with(prefill[0], decode[0], ratio)
    found = wanted(spec, {Role.PREFILL: p_asked, Role.DECODE: d_asked})
    for role, (fields, low, high) in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        one = found.of(role)
        assert (one.bound is Bound.WITHIN) == (one.replicas == one.asked)
        if one.bound is Bound.CLAMPED_TO_MIN:
            assert one.asked < low == one.replicas
            assert f"spec.{role}.scaling.minReplicas is {low}" in one.message
        if one.bound is Bound.CLAMPED_TO_MAX:
            assert one.asked > high == one.replicas
            assert f"spec.{role}.scaling.maxReplicas is {high}" in one.message
        if one.bound is Bound.HELD_BY_RATIO:
            assert "spec.ratio." in one.message
        if fields["replicas"] is not None:
            assert one.replicas == fields["replicas"], "a number in the spec is the number"


@given(roles(), roles(), bounds(), st.integers(0, 12), st.integers(0, 12))
def test_asking_for_what_one_gets_changes_nothing(prefill, decode, ratio, p_asked, d_asked):
    spec = spec_with(prefill[0], decode[0], ratio)
    once = wanted(spec, {Role.PREFILL: p_asked, Role.DECODE: d_asked}).replicas
    assert wanted(spec, once).replicas == once
