"""From what is observed to the numbers that a rollout is computed from."""

from typing import Final

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.observed import Body, Observed, entries
from dcp_operator.replicas import wanted
from dcp_operator.rollout.asked import asked_replicas
from dcp_operator.rollout.revisions import revisions
from dcp_operator.rollout.shares import Pair, bounds_of
from dcp_operator.rollout.situation import Engines, Revision, Situation
from dcp_operator.settings import Role
from dcp_operator.times import seconds_between
from dcp_operator.workloads import ComponentState, component_state, is_ready, pods_of

#: How long an engine may be not ready before an old revision does without it, in seconds.
STALE_S: Final = 60.0


def situation_of(observed: Observed, spec: Spec, target: str, now: str) -> Situation:
    """Return the numbers of an object. `now` is RFC 3339; without it nothing counts as away for long."""
    engines = wanted(spec, asked_replicas(observed, spec)).replicas
    return Situation(
        bounds=bounds_of(Pair(engines[Role.PREFILL], engines[Role.DECODE]), spec.rollout_strategy),
        routers=spec.router.replicas,
        target=target,
        revisions=tuple(_revision(observed, name, now) for name in revisions(observed)),
        is_paused=spec.paused,
    )


def stale_in_s(observed: Observed, target: str, now: str) -> float | None:
    """Return in how many seconds the next engine of an old revision counts as away for long; None where none will."""
    away = [
        _away_s(pod, now)
        for revision in revisions(observed)
        for role in Role
        if revision != target
        for pod in pods_of(observed, role, revision)
        if not is_ready(pod)
    ]
    return min((STALE_S - seconds for seconds in away if seconds is not None and seconds < STALE_S), default=None)


def _revision(observed: Observed, name: str, now: str) -> Revision:
    routers = component_state(observed, names.ROUTER, name)
    return Revision(
        name,
        prefill=_engines(component_state(observed, Role.PREFILL, name), now),
        decode=_engines(component_state(observed, Role.DECODE, name), now),
        routers=routers.wanted if routers.exists else None,
        ready_routers=routers.ready,
    )


def _engines(state: ComponentState, now: str) -> Engines:
    away = [pod for pod in state.pods if not is_ready(pod)]
    return Engines(
        replicas=state.wanted if state.exists else 0,
        ready=state.ready,
        stale=sum((_away_s(pod, now) or 0) >= STALE_S for pod in away),
        unschedulable=sum(map(_is_unschedulable, away)),
    )


def _away_s(pod: Body, now: str) -> float | None:
    """Return for how long a pod has not been ready, in seconds; None where that can't be told."""
    since: str = next(
        (
            condition["lastTransitionTime"]
            for condition in entries(pod, "status", "conditions")
            if condition.get("type") == "Ready" and condition.get("lastTransitionTime")
        ),
        pod["metadata"].get("creationTimestamp", ""),
    )
    return seconds_between(since, now)


def _is_unschedulable(pod: Body) -> bool:
    """Whether the scheduler has looked for a node in vain."""
    return any(
        condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for condition in entries(pod, "status", "conditions")
        if condition.get("status") == "False"
    )
