"""Where a rollout is and what is next: what the plan carries out and the status tells."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dcp_operator.api.spec import Spec
from dcp_operator.observed import Observed
from dcp_operator.reasons import Problem
from dcp_operator.rollout.counts import situation_of, stale_in_s
from dcp_operator.rollout.planner import next_step
from dcp_operator.rollout.situation import Counts, Situation, Step


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

    @property
    def waits_for(self) -> str | None:
        """What the rollout waits for, in words."""
        return self.step.waits_for

    @property
    def is_paused(self) -> bool:
        """Whether it is held: somebody asked for it, or the target waits for its model."""
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

    While there is a `gate`, which the target waits for before it begins, what runs is held as in a pause.
    """
    situation = situation_of(observed, spec, target, now)
    if gate is None:
        return RolloutState(situation, next_step(situation), stale_in_s(observed, target, now))
    situation = replace(situation, is_paused=True)
    step = next_step(situation)
    return RolloutState(situation, step if spec.paused else replace(step, waits_for=gate.message))
