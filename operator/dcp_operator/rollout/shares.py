"""Shares of a pair of roles: how much of the wanted engines a revision has, counted in matched engines.

With R_r engines wanted of role r, a share f in [0, 1] stands for ceil(f * R_r) engines of each role, and n_r engines of
each role are a share of min over r of n_r / R_r: what one role has beyond that has no partner. A role of which none are
wanted makes every share zero, because nothing is answered without it.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Final, NamedTuple

from dcp_operator.api.spec import RolloutStrategy

ONE: Final = Fraction(1)
NONE: Final = Fraction(0)


class Pair(NamedTuple):
    """A number of engines of each role."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a rollout may do, in engines of each role.

    `surge`: above the wanted number. `unavailable`: missing of it. `skew`: of the new revision, beyond what its ready
    engines of the other role pair with; None for no bound of its own.
    """

    wanted: Pair
    surge: Pair
    unavailable: Pair
    skew: Pair | None = None

    @property
    def floor(self) -> Fraction:
        """Return the share that has to be ready: min over roles of (R_r - unavailable_r) / R_r."""
        return share_of(Pair(*(r - u for r, u in zip(self.wanted, self.unavailable, strict=True))), self.wanted)

    @property
    def room(self) -> int:
        """Return with how many other revisions one can change places: min over roles of surge_r + unavailable_r.

        Shares are rounded up to engines, so each revision more that serves takes up to one engine more of each role.
        """
        return min(s + u for s, u in zip(self.surge, self.unavailable, strict=True))

    @property
    def is_even(self) -> bool:
        """Whether both roles want as many, so that no share is rounded."""
        return self.wanted.prefill == self.wanted.decode


def bounds_of(wanted: Pair, strategy: RolloutStrategy) -> Bounds:
    """Return the bounds of a rollout in engines.

    A percentage of maxSurge and maxSkew is rounded up, one of maxUnavailable down. Where surge and unavailable come out
    as 0 both, nothing could ever move, so one engine may be missing: the same as with Kubernetes' Deployments.
    """
    surge = Pair(*(_engines(strategy.max_surge, count, up=True) for count in wanted))
    missing = Pair(*(min(_engines(strategy.max_unavailable, count, up=False), count) for count in wanted))
    unavailable = Pair(*(u if s or u else min(1, count) for s, u, count in zip(surge, missing, wanted, strict=True)))
    stated = strategy.max_skew
    skew = Pair(*(max(_engines(stated, count, up=True), 1) for count in wanted)) if stated is not None else None
    return Bounds(wanted, surge, unavailable, skew)


def engines_of(share: Fraction, wanted: Pair) -> Pair:
    """Return the engines that a share stands for."""
    return Pair(*(ceil(share * count) for count in wanted))


def share_of(engines: Pair, wanted: Pair) -> Fraction:
    """Return the share that engines are, at most 1."""
    if 0 in wanted:
        return NONE
    return min(ONE, *(Fraction(max(have, 0), count) for have, count in zip(engines, wanted, strict=True)))


def largest_share(limits: Pair, wanted: Pair) -> Fraction:
    """Return the largest share whose engines are within limits; a role of which none are wanted limits nothing.

    ceil(f * R) <= limit exactly where f * R <= limit, as the limit is a whole number.
    """
    bound = [Fraction(max(limit, 0), count) for limit, count in zip(limits, wanted, strict=True) if count]
    return min(ONE, *bound) if bound else ONE


def rounded(share: Fraction, count: int) -> int:
    """Return a share of a count, rounded to the nearest, halves up."""
    return floor(share * count + Fraction(1, 2))


def _engines(value: int | str, count: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    part = Fraction(int(value.removesuffix("%")) * count, 100)
    return ceil(part) if up else floor(part)
