"""Rules on how many engines there are, and how a new revision replaces the old one."""

from collections.abc import Iterator

from dcp_operator.rules.context import Context, Problem, Rule


def replicas_or_scaling(context: Context) -> Iterator[Problem]:
    """The replica count of a role has exactly one owner: replicas or scaling.

    With both, every apply would set the count back that an autoscaler has just changed.

    Remove one of the two.
    """
    for role in context.roles:
        replicas, scaling = role.stated.replicas, role.stated.scaling
        if replicas is not None and scaling is not None:
            yield Problem(
                f"{role.path}.replicas",
                f"{replicas} is stated together with {role.path}.scaling ({scaling.min_replicas} to "
                f"{scaling.max_replicas}), and the replica count has exactly one owner; remove one of the two",
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
                f"{scaling.min_replicas} is above {path}.maxReplicas {scaling.max_replicas}; nearest that works: "
                f"{scaling.max_replicas}",
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
            "0 together with spec.rolloutStrategy.maxSurge 0 lets no rollout move, because it may "
            "neither add an engine nor take one away; nearest that works: 1, or maxSurge 1",
        )


RULES = (
    Rule("replicas-or-scaling", replicas_or_scaling),
    Rule("scaling-bounds", scaling_bounds),
    Rule("rollout-not-stuck", rollout_not_stuck),
)
