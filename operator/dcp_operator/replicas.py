"""How many engines each role should have: what the spec states or an autoscaler asks for, within bounds and ratio.

With a role's `replicas` the number is fixed. With `scaling` it is asked for through the role's scaler and kept within
[minReplicas, maxReplicas]. Then spec.ratio holds: with p prefill and d decode engines, min <= p / d <= max, as long as
both roles have engines. A role that has too many for the other is lowered first, to no less than its minimum; only if
that is not enough the other is raised, to no more than its maximum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil, floor

from dcp_operator.api.spec import Ratio, RoleSpec, Spec
from dcp_operator.settings import Role, role_spec


class Bound(StrEnum):
    """Why a role gets another number of engines than was asked for; the reason of a scaler's condition."""

    WITHIN = "Within"
    CLAMPED_TO_MIN = "ClampedToMin"
    CLAMPED_TO_MAX = "ClampedToMax"
    HELD_BY_RATIO = "HeldByRatio"


@dataclass(frozen=True, slots=True)
class WantedRole:
    """The engines that one role should have, beside those asked for, and why they differ."""

    asked: int
    replicas: int
    bound: Bound
    message: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The engines that both roles should have."""

    prefill: WantedRole
    decode: WantedRole

    def of(self, role: Role) -> WantedRole:
        """Return what is wanted of one role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def replicas(self) -> dict[Role, int]:
        """The number of engines by role."""
        return {role: self.of(role).replicas for role in Role}


@dataclass(frozen=True, slots=True)
class Range:
    """The engines that a role may have: one number with `replicas`, all from low to high with `scaling`."""

    low: int
    high: int

    def clamp(self, count: int) -> int:
        """Return the nearest number that is allowed."""
        return max(self.low, min(count, self.high))

    @property
    def used(self) -> "Range":
        """The range while the role has engines: a ratio takes no role away."""
        return Range(max(self.low, 1), self.high)


def wanted(spec: Spec, scalers: Mapping[Role, int]) -> Wanted:
    """Return the engines that both roles should have.

    `scalers` holds what is asked for by the scalers of roles that state `scaling`; such a role without one gets its
    minimum. Values of other roles are ignored. The number that is asked for is always honoured within the bounds; where
    they leave no number that meets the ratio, the nearest within the bounds is taken and the message says so.
    """
    ranges = {role: allowed_replicas(role_spec(spec, role)) for role in Role}
    asked = {role: _asked(spec, role, scalers) for role in Role}
    clamped = {role: ranges[role].clamp(asked[role]) for role in Role}
    held = dict(clamped)
    if spec.ratio is not None and all(clamped.values()):
        held = _meet_ratio(spec.ratio, clamped, ranges)
    prefill, decode = (
        _said(spec, role, asked[role], clamped[role], held, ranges[role]) for role in (Role.PREFILL, Role.DECODE)
    )
    return Wanted(prefill, decode)


def ratio_bounds(ratio: Ratio) -> tuple[Fraction, Fraction | None]:
    """Return the fewest and the most prefill engines per decode engine; None for no upper bound."""
    low = _fraction(ratio.min) if ratio.min is not None else Fraction(0)
    return low, _fraction(ratio.max) if ratio.max is not None else None


def meets_ratio(ratio: Ratio, prefill: int, decode: int) -> bool:
    """Whether numbers of engines, both above 0, are within the bounds of a ratio."""
    low, high = ratio_bounds(ratio)
    return low * decode <= prefill and (high is None or prefill <= high * decode)


def allowed_replicas(stated: RoleSpec) -> Range:
    """Return the engines that a role may have by its own fields."""
    if stated.scaling is None:
        count = 1 if stated.replicas is None else stated.replicas
        return Range(count, count)
    # Bounds that cross are refused by a rule; an object from before it gets its minimum.
    return Range(stated.scaling.min_replicas, max(stated.scaling.min_replicas, stated.scaling.max_replicas))


def _asked(spec: Spec, role: Role, scalers: Mapping[Role, int]) -> int:
    stated = role_spec(spec, role)
    return allowed_replicas(stated).low if stated.scaling is None else scalers.get(role, stated.scaling.min_replicas)


def _meet_ratio(ratio: Ratio, counts: Mapping[Role, int], ranges: Mapping[Role, Range]) -> dict[Role, int]:
    """Return the numbers that meet a ratio, or come nearest within the ranges.

    Lowering ends at the greatest pair below the one asked for, raising at the least pair above where that ended: pairs
    that meet a ratio are closed under taking the greater, or the smaller, of each role.
    """
    low, high = ratio_bounds(ratio)
    p, d = counts[Role.PREFILL], counts[Role.DECODE]
    prefill, decode = ranges[Role.PREFILL].used, ranges[Role.DECODE].used
    while True:
        p_less = p if high is None else max(min(p, floor(high * d)), prefill.low)
        d_less = d if low == 0 else max(min(d, floor(p_less / low)), decode.low)
        if (p_less, d_less) == (p, d):
            break
        p, d = p_less, d_less
    while True:
        p_more = min(max(p, ceil(low * d)), prefill.high)
        d_more = d if high is None else min(max(d, ceil(p_more / high)), decode.high)
        if (p_more, d_more) == (p, d):
            break
        p, d = p_more, d_more
    return {Role.PREFILL: p, Role.DECODE: d}


def _said(spec: Spec, role: Role, asked: int, clamped: int, held: Mapping[Role, int], within: Range) -> WantedRole:
    replicas, path = held[role], f"spec.{role}.scaling"
    if replicas != clamped and spec.ratio is not None:
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        how = "lowered" if replicas < clamped else "raised"
        words = f"{asked} asked for, {how} to {replicas}: {_ratio_words(spec.ratio)} beside {held[other]} {other}"
        if not meets_ratio(spec.ratio, held[Role.PREFILL], held[Role.DECODE]):
            words += ", which the bounds of the two roles don't allow to meet; change them or spec.ratio"
        return WantedRole(asked, replicas, Bound.HELD_BY_RATIO, words)
    if clamped > asked:
        words = f"{asked} asked for, {replicas} run: {path}.minReplicas is {within.low}"
        return WantedRole(asked, replicas, Bound.CLAMPED_TO_MIN, words)
    if clamped < asked:
        words = f"{asked} asked for, {replicas} run: {path}.maxReplicas is {within.high}"
        return WantedRole(asked, replicas, Bound.CLAMPED_TO_MAX, words)
    return WantedRole(asked, replicas, Bound.WITHIN, f"{replicas} asked for, and as many wanted")


def _ratio_words(ratio: Ratio) -> str:
    bounds = (("min", ratio.min), ("max", ratio.max))
    return " and ".join(f"spec.ratio.{name} is {value}" for name, value in bounds if value is not None)


def _fraction(text: str) -> Fraction:
    prefill, decode = text.split(":")
    return Fraction(int(prefill), int(decode))
