"""From what is wanted and what is observed to what is to be done: pure, computed afresh each time.

Nothing here reads the object's own status: a crash at any line, a second edit in the middle of a change or a missed
event leaves nothing to remember.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_operator import names
from dcp_operator.difference import first_difference
from dcp_operator.kinds import CHILD_KINDS, DEPLOYMENT, Ref, ref_of
from dcp_operator.observed import Child, Observed, Settled, essence
from dcp_operator.reasons import Problem, Reason
from dcp_operator.rollout import is_router, retired_revisions, routers_remain

_KIND_ORDER = {kind.kind: index for index, kind in enumerate(CHILD_KINDS)}


@dataclass(frozen=True, slots=True)
class Apply:
    """Make the live object say what the manifest says. `why` is for the log: missing, or the path that differs."""

    manifest: dict[str, Any] = field(repr=False)
    why: str
    #: Not seen in the cluster: the name may be taken by somebody else's object.
    is_new: bool

    @property
    def ref(self) -> Ref:
        """Kind and name."""
        return ref_of(self.manifest)


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove exactly the object with this uid, never another that has its name by now."""

    ref: Ref
    uid: str
    why: str


Action = Apply | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order, and what can't be done now."""

    actions: tuple[Action, ...] = ()
    blocked: tuple[Problem, ...] = ()


def make_plan(manifests: Sequence[dict[str, Any]], revision: str, observed: Observed, now: str = "") -> Plan:
    """Return the actions that make the cluster hold `manifests`, and no more than that.

    `now` (RFC 3339) tells whose grace period is over; without it nobody's is.
    Workloads of earlier revisions stay until `dcp_operator.rollout` lets them go. An object that is being removed gets
    nothing: Kubernetes removes its children by their owner references.
    """
    if observed.is_deleting:
        return Plan()
    actions: list[Action] = []
    blocked: list[Problem] = []
    for manifest in manifests:
        wanted = with_hash(manifest)
        child = observed.children.get(ref_of(wanted))
        if child is None:
            actions.append(Apply(wanted, "missing", is_new=True))
        elif not child.belongs_to(observed.uid):
            blocked.append(name_taken(child, observed))
        elif not child.is_deleting:
            why = _why_apply(wanted, child, observed.settled.get(child.ref))
            if why is not None:
                actions.append(Apply(wanted, why, is_new=False))
    desired = {ref_of(manifest) for manifest in manifests}
    actions.extend(_prune(desired, revision, observed, now))
    return Plan(tuple(actions), tuple(blocked))


def with_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own hash as an annotation.

    Replicas are left out of the hash: an autoscaler may change them, and their value is compared anyway.
    """
    spec = {key: value for key, value in manifest.get("spec", {}).items() if key != "replicas"}
    hashed = {**manifest, "spec": spec} if "spec" in manifest else manifest
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.ANNOTATION_DESIRED: names.digest(hashed, 16)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def settled(manifest: dict[str, Any], live: dict[str, Any]) -> Settled:
    """Return the record that applying `manifest` gave `live`."""
    return Settled(manifest["metadata"]["annotations"][names.ANNOTATION_DESIRED], names.digest(essence(live), 16))


def name_taken(child: Child, observed: Observed) -> Problem:
    """Return why an object with one of our names is left alone."""
    if child.is_deleting or child.labels.get(names.LABEL_NAME) == observed.key.name:
        return Problem(
            Reason.NAME_TAKEN,
            f"{child.ref} is left over from a deleted object of the same name; Kubernetes is removing it. If it stays, "
            f"delete it: kubectl -n {observed.key.namespace} delete {child.ref.kind.lower()} {child.ref.name}",
        )
    return Problem(
        Reason.NAME_TAKEN,
        f"{child.ref} exists already and was not made for this object, so it is left alone; delete or rename it, or "
        f"choose another name than {observed.key.name}",
    )


def _why_apply(wanted: dict[str, Any], child: Child, known: Settled | None) -> str | None:
    difference = first_difference(wanted, child.body)
    if difference is None:
        return None
    # What the API server itself made of this manifest is as close as it gets: don't write the same again and again.
    return None if known == settled(wanted, child.body) else f"{difference} differs"


def _prune(desired: set[Ref], revision: str, observed: Observed, now: str) -> list[Delete]:
    """Return what is this object's and no longer wanted, in the opposite order of making."""
    retired = retired_revisions(observed, revision)
    result: list[Delete] = []
    for child in _reversed_order(observed.children.values()):
        if child.ref in desired or child.is_deleting or not child.belongs_to(observed.uid):
            continue
        if child.ref.kind == DEPLOYMENT.kind and child.revision not in (None, revision):
            why = retired.get(child.revision or "")
            if why is not None and (is_router(child) or not routers_remain(observed, child.revision or "", now)):
                result.append(Delete(child.ref, child.uid, why))
        else:
            result.append(Delete(child.ref, child.uid, "not wanted any more"))
    return result


def _reversed_order(children: Iterable[Child]) -> list[Child]:
    return sorted(children, key=lambda child: (-_KIND_ORDER.get(child.ref.kind, 0), child.ref.name))
