"""The history of an object: one ControllerRevision for each state of what its pods are made from.

A state is the spec without what says how many, how fast and beside what: numbers of engines and routers, rollout
strategy, pause, budgets and policies. `dcpctl rollout undo` writes a state back and leaves the rest as it is. Numbers
count up; a state that is used again gets the newest number instead of a second object.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.kinds import CONTROLLER_REVISION
from dcp_operator.observed import Observed

#: Fields of the spec that are no part of a state: an edit of them makes no new one, and undo leaves them alone.
OUTSIDE: Final = frozenset(
    {"ratio", "rolloutStrategy", "paused", "revisionHistoryLimit", "networkPolicy", "transferCheck"}
)
#: The same, of the roles and of the router.
OUTSIDE_OF: Final = {
    "prefill": frozenset({"replicas", "scaling", "disruptionBudget"}),
    "decode": frozenset({"replicas", "scaling", "disruptionBudget"}),
    "router": frozenset({"replicas"}),
}


@dataclass(frozen=True, slots=True)
class Kept:
    """One state that the cluster holds: the object's name, its number, and the pair revision of its pods."""

    name: str
    number: int
    revision: str | None


def template_state(spec: Spec) -> dict[str, Any]:
    """Return the state of a spec, JSON-ready, without fields that have their default.

    A field that a later version of the API adds is absent until somebody sets it, so an upgrade makes no new state.
    """
    stated = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    state = {key: value for key, value in stated.items() if key not in OUTSIDE}
    for part, outside in OUTSIDE_OF.items():
        if part in state:
            state[part] = {key: value for key, value in state[part].items() if key not in outside}
    return {key: value for key, value in state.items() if value != {} or key in ("prefill", "decode")}


def known_states(observed: Observed) -> list[Kept]:
    """Return the states that the cluster holds of an object, the newest last."""
    found = [
        Kept(ref.name, child.body["revision"], child.labels.get(names.LABEL_REVISION))
        for ref, child in observed.children.items()
        if ref.kind == CONTROLLER_REVISION.kind and child.belongs_to(observed.uid) and not child.is_deleting
    ]
    return sorted(found, key=lambda kept: (kept.number, kept.name))


def build_history(context: Context, revision: str, known: Iterable[Kept]) -> list[Manifest]:
    """Return the ControllerRevisions that an object should have; those of `known` that are left out are to go.

    `revision` is the pair revision that the present state makes. Of earlier states as many stay as
    revisionHistoryLimit says, the newest ones. While rollouts are paused no state is recorded: nothing is made from it.
    """
    states = sorted(known, key=lambda kept: (kept.number, kept.name))
    if context.spec.paused:
        return [_of_known(context, kept) for kept in states]
    state = template_state(context.spec)
    name = names.history(context.name, state)
    newest = states[-1] if states else None
    number = newest.number if newest is not None and newest.name == name else (newest.number if newest else 0) + 1
    earlier = [kept for kept in states if kept.name != name]
    limit = context.spec.revision_history_limit
    current = _manifest(context, name, number, revision) | {"data": {"spec": state}}
    return [*(_of_known(context, kept) for kept in earlier[max(0, len(earlier) - limit) :]), current]


def _of_known(context: Context, kept: Kept) -> Manifest:
    return _manifest(context, kept.name, kept.number, kept.revision)


def _manifest(context: Context, name: str, number: int, revision: str | None) -> Manifest:
    return {
        "apiVersion": CONTROLLER_REVISION.api_version,
        "kind": CONTROLLER_REVISION.kind,
        "metadata": metadata(context, name, revision=revision),
        "revision": number,
    }
