"""Where a rollout is and what is next: what the plan carries out and the status tells."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dcp_operator.api.spec import Spec
from dcp_operator.observed import Observed
from dcp_operator.reasons import Problem
from dcp_operator.rollout.asked import missing_scaler
from dcp_operator.rollout.counts import situation_of, stale_in_s
from dcp_operator.rollout.planner import next_step
from dcp_operator.rollout.situation import Counts, Revision, Situation, Step
from dcp_operator.rollout.unseen import has_pods_of_groups, unseen_workloads


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where a rollout is, and its next step.

    `waits_for` says in words what the step after the next one waits for, None where nothing is left to wait for: the
    status shows it as it is. `situation` has the numbers that were seen: per revision the engines asked for, ready and
    unschedulable, and `situation.serving(revision)` its share of what has to be served, in matched pairs.
    """

    situation: Situation
    step: Step
    #: Seconds after which the next step is another, though nothing happens; None where that can't be.
    look_again_s: float | None = field(default=None, compare=False)
    #: Why workloads that the object has or wants can't be seen, None where all can.
    unseen: Problem | None = None
    #: Whether it is held because a role's scaler is missing.
    lacks_scaler: bool = False

    @property
    def waits_for(self) -> str | None:
        """What the rollout waits for, in words."""
        return self.step.waits_for

    @property
    def is_paused(self) -> bool:
        """Whether it is held: by somebody, or its model or a role's scaler is missing, or workloads can't be seen."""
        return self.situation.is_paused

    @property
    def replicas(self) -> Mapping[str, Counts]:
        """Replicas of the workloads by revision, after the next step."""
        return self.step.replicas

    @property
    def retired(self) -> Mapping[str, str]:
        """Revisions that go, each with why."""
        return self.step.retired


def rollout_state(observed: Observed, spec: Spec, target: str, now: str, gate: Problem | None = None) -> RolloutState:
    """Return where the rollout of a revision is; `now` is RFC 3339.

    While there is a `gate`, which the target waits for before it begins, what runs is held as in a pause. So it is
    while a role's scaler is missing beside engines of an older revision, and while workloads can't be seen: the
    revision that looks as if it didn't serve may be the one that does.
    """
    situation = situation_of(observed, spec, target, now)
    unseen = unseen_workloads(observed, spec)
    is_blind = unseen is not None and (bool(situation.revisions) or has_pods_of_groups(observed))
    scaler = missing_scaler(observed, spec, target)
    why = unseen if is_blind else gate or scaler
    if why is None:
        return RolloutState(situation, next_step(situation), stale_in_s(observed, target, now), unseen)
    situation = replace(situation, is_paused=True)
    step = next_step(situation)
    if is_blind and len(situation.revisions) > 1:
        # Which of them serves most isn't known, so that none gets anything of another.
        step = replace(step, replicas={each.name: _as_it_is(each, step) for each in situation.revisions})
    words = step.waits_for if spec.paused else why.message
    return RolloutState(situation, replace(step, waits_for=words), unseen=unseen, lacks_scaler=why is scaler)


def _as_it_is(revision: Revision, step: Step) -> Counts:
    """Return what a revision's workloads ask for; a router that it lacks isn't made as one that nobody asks for."""
    routers = step.replicas[revision.name].router if revision.routers is None else revision.routers
    return Counts(*revision.replicas, router=routers)
