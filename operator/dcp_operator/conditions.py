"""What every condition says: pure, from what is wanted and what is observed (docs/adr/0017-what-the-status-says.md).

Ready speaks of the present spec alone: it is False from the moment that the spec changes until every pod of the new
revision is ready and no other revision has anything left. Available speaks of requests: whether the engines of all
revisions together answer as many as a rollout may never go below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from dcp_operator import names
from dcp_operator.compatibility import config_compatible
from dcp_operator.kinds import SCALER
from dcp_operator.observed import Observed
from dcp_operator.problems import component_problem
from dcp_operator.reasons import Problem, Reason, Said
from dcp_operator.rollout import is_routed, is_users_router, revisions, serving_revisions
from dcp_operator.rollout.shares import NONE, ONE, Pair, bounds_of, engines_of, share_of
from dcp_operator.settings import Role, role_spec
from dcp_operator.target import Target
from dcp_operator.workloads import ComponentState, labels_of, pods_of, revision_states

READY = "Ready"
AVAILABLE = "Available"
PROGRESSING = "Progressing"
CONFIG_COMPATIBLE = "ConfigCompatible"
KV_TRANSFER_VERIFIED = "KVTransferVerified"
COMPONENT_CONDITIONS = {
    Role.PREFILL.value: "PrefillReady",
    Role.DECODE.value: "DecodeReady",
    names.ROUTER: "RouterReady",
}
#: What KVTransferVerified says before the first check.
NOT_CHECKED = Said("Unknown", Reason.NOT_CHECKED, "no transfer has been checked yet; that is done when Ready is True")


@dataclass(frozen=True, slots=True)
class View:
    """One pass's facts, as the conditions and the rest of the status read them."""

    observed: Observed
    target: Target
    #: The revision that the component conditions speak of, and its components.
    shown: str | None
    states: Mapping[str, ComponentState]
    #: Pods wanted of each component.
    goals: Mapping[str, int]
    #: Revisions that answer requests, oldest first.
    serving: Sequence[str]
    #: The part of the wanted capacity that each revision gives, oldest first.
    capacities: Mapping[str, Fraction]
    #: Other revisions that have workloads or pods that aren't going yet.
    left_over: Sequence[str]

    @property
    def engines_wanted(self) -> Pair:
        """Engines wanted of each role."""
        return Pair(self.goals[Role.PREFILL], self.goals[Role.DECODE])

    @property
    def routers(self) -> int | None:
        """Routers that the spec states, None where no spec is acted upon."""
        return _routers(self.target)

    @property
    def is_users_router(self) -> bool:
        """Whether the router of the revision that is shown is the user's own."""
        state = self.states.get(names.ROUTER)
        asked = state.wanted if state is not None and state.exists else None
        return is_users_router(self.routers, asked, is_target=self.shown == self.target.revision)

    @property
    def is_complete(self) -> bool:
        """Whether every pod of the present spec's revision is ready, and nothing of another is left to go."""
        return (
            self.target.revision is not None
            and self.shown == self.target.revision
            and not self.left_over
            and all(_is_as_wanted(self.states[component], self.goals[component]) for component in names.COMPONENTS)
            and 0 not in self.engines_wanted
        )


def look(observed: Observed, target: Target, goals: Mapping[str, int] | None) -> View:
    """Return the facts that conditions speak of.

    `goals` are the pods wanted of each component. Without them (a spec that can't be read) those are taken that the
    workloads of the revision that is shown ask for: of a spec that is refused that is the one that serves, or the
    newest.
    """
    serving = serving_revisions(observed, _routers(target), target.revision)
    made = revisions(observed)
    shown = target.revision
    if made and (shown is None or (target.spec is not None and target.spec.paused and shown not in made)):
        # Nothing of the new revision is made; the one that runs is what there is to say something about.
        shown = serving[-1] if serving else made[-1]
    states = revision_states(observed, shown) if shown is not None else {}
    asked = goals or {component: states[component].wanted if states else 0 for component in names.COMPONENTS}
    left_over = [revision for revision in _all_revisions(observed) if revision != target.revision]
    view = View(observed, target, shown, states, asked, serving, {}, left_over if target.revision else ())
    return replace(view, capacities={revision: _capacity(view, revision) for revision in made})


def decide(view: View, failures: Sequence[Problem], transfer: Said | None, held: str | None) -> dict[str, Said]:
    """Return what every condition says, by type, in the order in which they are listed.

    `failures` is what could not be written, `transfer` what the last check of the KV transfer found, and `held` what
    the next step of a rollout waits for, in words.
    """
    components = {component: _component(view, component) for component in names.COMPONENTS}
    engines_run = view.shown == view.target.revision and all(components[role].status == "True" for role in Role)
    config = config_compatible(view.target, engines_run=view.target.revision is not None and engines_run)
    problems = [Problem(said.reason, said.message) for said in (config,) if said.status == "False"]
    problems += failures
    problems += [view.target.gate] if view.target.gate is not None else []
    problems += [Problem(said.reason, said.message) for said in components.values() if said.status == "False"]
    worst = min(problems, key=lambda problem: problem.reason.rank, default=None)
    held_back = _held_back(view)
    if held_back is not None and (worst is None or worst.reason.is_progress):
        worst = held_back
    return {
        READY: _ready(view, worst, held),
        AVAILABLE: _available(view, worst),
        PROGRESSING: _progressing(view, worst, held),
        **{COMPONENT_CONDITIONS[component]: said for component, said in components.items()},
        CONFIG_COMPATIBLE: config,
        KV_TRANSFER_VERIFIED: transfer or NOT_CHECKED,
    }


def _ready(view: View, worst: Problem | None, held: str | None) -> Said:
    if worst is None and view.is_complete:
        how = "your own router brings them requests" if view.is_users_router else "requests are answered"
        words = f"all pods of revision {view.target.revision} are ready and {how}"
        return Said("True", Reason.SERVING, words)
    problem = worst or Problem(Reason.ROLLING_OUT, _under_way(view, held))
    others = [name for name in view.serving if name != view.target.revision]
    keeps = f"; revision {others[-1]} keeps serving" if others else ""
    return Said("False", problem.reason, f"{problem.message}{keeps}")


def _progressing(view: View, worst: Problem | None, held: str | None) -> Said:
    if view.target.spec is not None and view.target.spec.paused and (worst is None or worst.reason is Reason.PAUSED):
        words = "spec.paused is true; no change of pods is held back by it"
        return Said("False", Reason.PAUSED, worst.message if worst else words)
    if worst is None and view.is_complete:
        words = f"revision {view.target.revision} is rolled out; nothing is left to do"
        return Said("False", Reason.ROLLED_OUT, words)
    if worst is None or worst.reason.is_progress:
        waiting = worst.message if worst else _under_way(view, held)
        return Said("True", Reason.ROLLING_OUT, f"revision {view.target.revision} is being rolled out: {waiting}")
    return Said("False", worst.reason, worst.message)


def _available(view: View, worst: Problem | None) -> Said:
    wanted, spec = view.engines_wanted, view.target.spec
    capacity = min(ONE, sum(view.capacities.values(), NONE))
    floor = bounds_of(wanted, spec.rollout_strategy).floor if spec is not None else NONE
    needed = " and ".join(f"{count} {role}" for role, count in engines_of(floor, wanted)._asdict().items())
    if capacity > 0 and capacity >= floor:
        return Said("True", Reason.SERVING, f"requests are answered by no fewer than {needed} engines")
    if capacity > 0:
        words = f"{int(capacity * 100)}% of the wanted engines answer requests, in pairs; {needed} are needed"
        return Said("False", Reason.CAPACITY_BELOW_FLOOR, words)
    problem = worst or Problem(Reason.ROLLING_OUT, "no revision has a ready engine of each role and a router")
    return Said("False", problem.reason, f"no request is answered: {problem.message}")


def _component(view: View, component: str) -> Said:
    state, goal = view.states.get(component), view.goals[component]
    if component == names.ROUTER and goal == 0 and view.is_users_router:
        return _users_router(state)
    if goal == 0 and view.shown is not None:
        words = f"{component} has 0 replicas, so no request can be answered; {_raise(view, component)}"
        return Said("False", Reason.SCALED_TO_ZERO, words)
    gate = view.target.gate
    if gate is not None and component != names.ROUTER and (state is None or not state.exists):
        return Said("False", gate.reason, gate.message)
    if state is None or not state.exists:
        return Said("False", Reason.PODS_PENDING, f"no {component} pods exist yet")
    problem = component_problem(state, view.observed.key.namespace)
    if problem is not None:
        return Said("False", problem.reason, problem.message)
    if state.wanted != goal:
        words = f"{state.ready} of {goal} {component} pods of revision {state.revision} are ready"
        return Said("False", Reason.ROLLING_OUT, f"{words}; a rollout or a scale is under way")
    return Said("True", Reason.PODS_READY, f"{state.ready} of {goal} {component} pods are ready")


def _capacity(view: View, revision: str) -> Fraction:
    """Return the part of the wanted capacity that a revision gives: its ready engines in pairs, if routed."""
    states = revision_states(view.observed, revision)
    if not is_routed(states, view.routers, is_target=revision == view.target.revision):
        return NONE
    return share_of(Pair(states[Role.PREFILL].ready, states[Role.DECODE].ready), view.engines_wanted)


def _raise(view: View, component: str) -> str:
    """Return how a component gets replicas again: its number has one owner."""
    spec, key = view.target.spec, view.observed.key
    if component != names.ROUTER and spec is not None and role_spec(spec, Role(component)).scaling is not None:
        scaler = f"{SCALER.plural}/{names.scaler(key.name, Role(component))}"
        return f"its scaler asks for none: kubectl -n {key.namespace} scale {scaler} --replicas=1"
    return "raise replicas"


def _held_back(view: View) -> Problem | None:
    """Return what a pause holds back, None where it does not."""
    spec, revision = view.target.spec, view.target.revision
    if spec is None or not spec.paused or revision is None:
        return None
    if view.shown == revision and not view.left_over and revision in view.capacities:
        return None
    what = f"the rollout of revision {revision}" if _all_revisions(view.observed) else "the first revision"
    return Problem(Reason.PAUSED, f"spec.paused holds {what}; set it to false, or: dcpctl rollout resume")


def _under_way(view: View, held: str | None) -> str:
    if held is not None:
        return held
    if view.left_over:
        return f"pods of revision {', '.join(view.left_over)} are left to go"
    return "pods are being made"


def _is_as_wanted(state: ComponentState, goal: int) -> bool:
    return (state.is_complete and state.wanted == goal) or (goal == 0 and state.replicas == 0)


def _users_router(state: ComponentState | None) -> Said:
    """Return what RouterReady says where the router is the user's own."""
    if state is not None and state.replicas:
        left = f"{state.replicas} router pods of revision {state.revision} are left to go"
        return Said("False", Reason.ROLLING_OUT, f"{left}: spec.router.replicas is 0, so the router is your own")
    words = "spec.router.replicas is 0, so none is made: the router is your own, and sends requests to the engines"
    return Said("True", Reason.OWN_ROUTER, words)


def _routers(target: Target) -> int | None:
    return target.spec.router.replicas if target.spec is not None and target.revision is not None else None


def _all_revisions(observed: Observed) -> list[str]:
    """Return the revisions that have a workload, oldest first, then those that only have pods left."""
    made = revisions(observed)
    pods = [pod for component in names.COMPONENTS for pod in pods_of(observed, component)]
    in_pods = {labels_of(pod).get(names.LABEL_REVISION) for pod in pods}
    return [*made, *sorted(revision for revision in in_pods if revision is not None and revision not in made)]
