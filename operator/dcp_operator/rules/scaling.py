"""Rules on how many engines there are, and how a new revision replaces the old one."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, floor
from typing import Final

from dcp_operator import names
from dcp_operator.api import sentences
from dcp_operator.api.findings import Severity
from dcp_operator.api.spec import MAX_REPLICAS
from dcp_operator.replicas import Range, allowed_replicas, ratio_bounds
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.settings import role_spec

#: Stands for a ratio without an upper bound: more prefill engines for a decode engine than there can be.
_ENDLESS: Final = Fraction(MAX_REPLICAS + 1)


def replicas_or_scaling(context: Context) -> Iterator[Problem]:
    """The replica count of a role has exactly one owner, replicas or scaling, and both roles the same kind of owner.

    With both on one role, every apply would set the count back that an autoscaler has just changed. With scaling on one
    role only (a warning), the other doesn't follow and becomes what limits or what idles.

    Remove one of the two; state scaling on both roles, or spec.ratio.
    """
    for role in context.roles:
        replicas, scaling = role.stated.replicas, role.stated.scaling
        if replicas is not None and scaling is not None:
            yield Problem(
                f"{role.path}.replicas",
                sentences.REPLICAS_OR_SCALING.say(
                    role=role.role, replicas=replicas, low=scaling.min_replicas, high=scaling.max_replicas
                ),
                fixes=(Fix(f"{role.path}.replicas", REMOVED), Fix(f"{role.path}.scaling", REMOVED)),
            )
    yield from _same_kind(context)


def _same_kind(context: Context) -> Iterator[Problem]:
    """Warn where one role moves and the other stands still: the ratio between them goes with it."""
    scaled = [role for role in context.roles if role.stated.scaling is not None]
    if len(scaled) != 1 or context.spec.ratio is not None:
        return
    (moving,) = scaled
    still = context.decode if moving is context.prefill else context.prefill
    scaling = moving.stated.scaling
    if scaling is not None and scaling.min_replicas < scaling.max_replicas:
        yield Problem(
            f"{still.path}.scaling",
            f"is not stated while {moving.path}.scaling goes from {scaling.min_replicas} to {scaling.max_replicas}, so "
            f"{still.role} stays at {allowed_replicas(still.stated).low} whatever the load; scale both roles, or "
            "state spec.ratio to say which ratios are meant",
            Severity.WARNING,
        )


def scaling_bounds(context: Context) -> Iterator[Problem]:
    """minReplicas is at most maxReplicas.

    No replica count satisfies bounds that cross.

    Lower minReplicas or raise maxReplicas.
    """
    for role in context.roles:
        scaling = role.stated.scaling
        if scaling is not None and scaling.min_replicas > scaling.max_replicas:
            path = f"{role.path}.scaling"
            yield Problem(
                f"{path}.minReplicas",
                sentences.SCALING_BOUNDS.say(role=role.role, low=scaling.min_replicas, high=scaling.max_replicas),
                fixes=(
                    Fix(f"{path}.minReplicas", scaling.max_replicas),
                    Fix(f"{path}.maxReplicas", scaling.min_replicas),
                ),
            )


def ratio_achievable(context: Context) -> Iterator[Problem]:
    """Some number of prefill and decode engines within the bounds meets spec.ratio.

    The ratio bounds how many prefill engines there are for each decode engine. If no numbers within replicas, or within
    minReplicas and maxReplicas, meet it, an autoscaler would never settle.

    Change the bounds of a role, or the ratio.
    """
    ratio = context.spec.ratio
    if ratio is None:
        return
    low, upper = ratio_bounds(ratio)
    high = _ENDLESS if upper is None else upper
    if low > high:
        yield Problem(
            "spec.ratio.min",
            f"{ratio.min} is above spec.ratio.max {ratio.max}, so no numbers of engines meet both",
            fixes=(Fix("spec.ratio.min", ratio.max or ""), Fix("spec.ratio.max", ratio.min or "")),
        )
        return
    # A role that is scaled to zero meets no ratio and breaks none: what counts are the numbers while both run.
    prefill, decode = (allowed_replicas(role.stated).used for role in context.roles)
    if prefill.high == 0 or decode.high == 0 or _meets(prefill, decode, low, high):
        return
    field = "min" if Fraction(prefill.high, decode.low) < low else "max"
    nearest = Fraction(prefill.high, decode.low) if field == "min" else Fraction(prefill.low, decode.high)
    yield Problem(
        f"spec.ratio.{field}",
        f"{ratio.min if field == 'min' else ratio.max} can't be met by {_words(prefill, 'prefill')} and "
        f"{_words(decode, 'decode')}",
        fixes=(
            *([Fix(f"spec.ratio.{field}", f"{nearest.numerator}:{nearest.denominator}")] if nearest else []),
            *_replica_fixes(context, prefill, decode, low, high),
            Fix("spec.ratio", REMOVED),
        ),
    )


def _words(engines: Range, role: str) -> str:
    count = str(engines.low) if engines.low == engines.high else f"{engines.low} to {engines.high}"
    return f"{count} {role} engine{'' if count == '1' else 's'}"


def _meets(prefill: Range, decode: Range, low: Fraction, high: Fraction) -> bool:
    """Whether p prefill and d decode engines exist with low <= p / d <= high."""
    return any(
        max(prefill.low, ceil(low * engines)) <= min(prefill.high, floor(high * engines))
        for engines in range(decode.low, decode.high + 1)
    )


def _replica_fixes(context: Context, prefill: Range, decode: Range, low: Fraction, high: Fraction) -> Iterator[Fix]:
    """Yield numbers of replicas that meet the ratio, for roles that state replicas."""
    for role, mine in ((context.prefill, prefill), (context.decode, decode)):
        if role.stated.replicas is None:
            continue
        counts = range(1, min(MAX_REPLICAS, 8 * max(mine.high, prefill.high, decode.high)) + 1)
        for count in counts:
            own = Range(count, count)
            pair = (own, decode) if role is context.prefill else (prefill, own)
            if _meets(*pair, low, high):
                yield Fix(f"{role.path}.replicas", count)


def scaling_handover(context: Context) -> Iterator[Problem]:
    """An update that takes scaling away takes the target of autoscalers away (a warning).

    With spec.ROLE.scaling the role has a DCPDisaggRoleScaler on which autoscalers act. Without it the scaler is
    deleted, the number of engines is that of replicas, 1 if that is not stated, and a HorizontalPodAutoscaler or
    ScaledObject that points at the scaler fails from then on.

    Delete the autoscalers of the role, and state replicas as many as run: kubectl get dcpds shows how many.
    """
    for role in context.roles:
        before = role_spec(context.before, role.role) if context.before is not None else None
        if before is not None and before.scaling is not None and role.stated.scaling is None:
            count = allowed_replicas(role.stated).low
            name = names.scaler(context.obj.metadata.name, role.role)
            yield Problem(
                f"{role.path}.scaling",
                f"is taken away: replicas of {role.role} are {count} now, and the autoscalers of DCPDisaggRoleScaler "
                f"{name} lose their target; delete them",
                Severity.WARNING,
            )


def rollout_not_stuck(context: Context) -> Iterator[Problem]:
    """maxSurge and maxUnavailable are not both 0.

    A rollout replaces an engine by adding one first (maxSurge) or by taking one away first (maxUnavailable). With
    both at 0 it may do neither and never moves.

    Set one of them to 1 or more. maxSurge needs spare accelerators, maxUnavailable costs capacity.
    """
    strategy = context.spec.rollout_strategy
    if strategy.max_surge in (0, "0%") and strategy.max_unavailable in (0, "0%"):
        yield Problem(
            "spec.rolloutStrategy.maxUnavailable",
            sentences.ROLLOUT_NOT_STUCK.say(),
            fixes=(Fix("spec.rolloutStrategy.maxUnavailable", 1), Fix("spec.rolloutStrategy.maxSurge", 1)),
        )


RULES = (
    Rule("replicas-or-scaling", replicas_or_scaling, sources=("aibrix #2780", "llm-d-deployer #292")),
    Rule("scaling-bounds", scaling_bounds),
    Rule("ratio-achievable", ratio_achievable, sources=("lws #849", "aibrix #1260")),
    Rule("scaling-handover", scaling_handover, sources=("aibrix #2780",)),
    Rule("rollout-not-stuck", rollout_not_stuck, sources=("rbg #307",)),
)
