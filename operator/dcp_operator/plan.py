"""From what is wanted and what is observed to what is to be done: pure, computed afresh each time.

Nothing here reads the object's own status: a crash at any line, a second edit in the middle of a change or a missed
event leaves nothing to remember.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_operator import names
from dcp_operator.difference import first_difference
from dcp_operator.kinds import CHILD_KINDS, DEPLOYMENT, LEADER_WORKER_SET, WORKLOAD_KINDS, Ref, lasting, ref_of
from dcp_operator.observed import Child, Observed, Settled, controller_of, essence
from dcp_operator.reasons import Problem, Reason
from dcp_operator.rollout import RolloutState, is_router, routers_remain
from dcp_operator.target import Target

_KIND_ORDER = {kind.kind: index for index, kind in enumerate(CHILD_KINDS)}
_KIND_ORDER[LEADER_WORKER_SET.kind] = _KIND_ORDER[DEPLOYMENT.kind]


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
    #: It was made for another object, which had this one's name.
    is_left_over: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Make exactly the workload with this uid ask for so many pods, and leave its template as it is."""

    ref: Ref
    uid: str
    replicas: int
    why: str


Action = Apply | Scale | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order, and what can't be done now."""

    actions: tuple[Action, ...] = ()
    blocked: tuple[Problem, ...] = ()


def make_plan(target: Target, observed: Observed, now: str = "") -> Plan:
    """Return the actions that make the cluster hold the target's manifests, and no more than that.

    `now` (RFC 3339) tells whose grace period is over; without it nobody's is.
    How many pods a revision's workloads ask for, and which revisions go, is for `dcp_operator.rollout` to say. While
    rollouts are paused, workloads that exist get no new template. A refused object, and one that is being removed, gets
    nothing: Kubernetes removes its children by their owner references.
    """
    rollout = target.rollout
    if observed.is_deleting or rollout is None:
        return Plan()
    manifests = [sized for manifest in target.manifests if (sized := _sized(manifest, rollout)) is not None]
    actions: list[Action] = list(_clear(observed))
    cleared = {action.ref for action in actions}
    left = _pods_left(observed)
    blocked = [rollout.unseen] if rollout.unseen is not None else []
    for manifest in manifests:
        if manifest["kind"] in observed.unavailable:
            continue
        wanted = with_hash(manifest)
        child = observed.children.get(ref_of(wanted))
        if child is None and manifest["kind"] in WORKLOAD_KINDS and left is not None:
            blocked += [left] if left not in blocked else []
        elif child is None:
            actions.append(Apply(wanted, "missing", is_new=True))
        elif child.ref in cleared:
            continue
        elif not child.belongs_to(observed.uid):
            blocked.append(name_taken(child, observed))
        elif not child.is_deleting:
            if rollout.is_paused and child.ref.kind in WORKLOAD_KINDS:
                actions.extend(_scale(child, wanted["spec"]["replicas"]))
                continue
            kept = lasting(wanted)
            why = _why_apply(kept, child, observed.settled.get(child.ref))
            if why is not None:
                actions.append(Apply(kept, why, is_new=False))
    actions.extend(_resize_old(rollout, observed))
    desired = {ref_of(manifest) for manifest in target.manifests}
    actions.extend(_prune(desired, rollout, observed, now))
    return Plan(tuple(actions), tuple(blocked))


def _clear(observed: Observed) -> Iterable[Delete]:
    """Return what an object of the same name has left over and Kubernetes is not removing.

    Its collector of garbage misses the end of an object that is made anew while its watch is cut: it then takes the new
    one for the old one, and keeps what the old one owned for as long as it runs.
    """
    for child in _reversed_order(observed.children.values()):
        if child.is_left_over(observed.key.name, observed.uid) and not child.is_deleting:
            yield Delete(child.ref, child.uid, "left over from a deleted object of the same name", is_left_over=True)


def _pods_left(observed: Observed) -> Problem | None:
    """Return what is to be waited for where pods of a deleted object of the same name run on.

    The collector of garbage misses the end of a workload, too, if another one gets its name while its watch is cut.
    """
    name, uid = observed.key.name, observed.uid
    workloads = [child for ref, child in observed.children.items() if ref.kind in WORKLOAD_KINDS]
    if not all(child.is_left_over(name, uid) for child in workloads):
        # Ours, or kept on purpose when an object was deleted: nobody is about to remove their pods.
        return None
    left = [pod for pod in observed.pods if _is_of_another(pod["metadata"], observed)]
    if not left:
        return None
    first, owner = left[0]["metadata"]["name"], controller_of(left[0])
    what = f"{owner['kind'].lower()} {owner['name']}" if owner else f"pod {first}"
    return Problem(
        Reason.NAME_TAKEN,
        f"{len(left)} pods of a deleted object of the same name are there, {first} for example, and Kubernetes "
        "is about to remove them; workloads are made when it has begun to. If they stay, delete what they belong to: "
        f"kubectl -n {observed.key.namespace} delete {what}",
    )


def _is_of_another(metadata: Mapping[str, Any], observed: Observed) -> bool:
    """Whether a pod of a revision is older than the object, and nothing removes it yet."""
    began = observed.body["metadata"].get("creationTimestamp", "")
    return (
        names.LABEL_REVISION in metadata.get("labels", {})
        and "deletionTimestamp" not in metadata
        and metadata.get("creationTimestamp", "") < began
    )


def _sized(manifest: dict[str, Any], rollout: RolloutState) -> dict[str, Any] | None:
    """Return a manifest with the replicas of the next step, None for a workload whose turn has not come."""
    if manifest["kind"] not in WORKLOAD_KINDS:
        return manifest
    counts = rollout.replicas.get(rollout.situation.target)
    if counts is None:
        return None
    replicas = counts.of(manifest["metadata"]["labels"][names.LABEL_ROLE])
    return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}


def _resize_old(rollout: RolloutState, observed: Observed) -> Iterable[Scale]:
    """Return what gives the workloads of old revisions their number of pods: routers first, then engines."""
    target = rollout.situation.target
    old = {revision: counts for revision, counts in rollout.replicas.items() if revision != target}
    for component in reversed(names.COMPONENTS):
        for revision, counts in old.items():
            child = observed.workload(component, revision)
            if child is not None and not child.is_deleting:
                yield from _scale(child, counts.of(component))


def _scale(child: Child, replicas: int) -> Iterable[Scale]:
    if child.body["spec"].get("replicas", 1) != replicas:
        yield Scale(child.ref, child.uid, replicas, _resized(child, replicas))


def with_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own hash as an annotation.

    Replicas are left out of the hash: an autoscaler may change them, and their value is compared anyway. So is what is
    given once.
    """
    hashed = lasting(manifest)
    if "spec" in hashed:
        hashed["spec"] = {key: value for key, value in hashed["spec"].items() if key != "replicas"}
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.ANNOTATION_DESIRED: names.digest(hashed, 16)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def settled(manifest: dict[str, Any], live: dict[str, Any]) -> Settled:
    """Return the record that applying `manifest` gave `live`."""
    return Settled(manifest["metadata"]["annotations"][names.ANNOTATION_DESIRED], names.digest(essence(live), 16))


def name_taken(child: Child, observed: Observed) -> Problem:
    """Return why an object with one of our names is left alone."""
    delete = f"kubectl -n {observed.key.namespace} delete {child.ref.kind.lower()} {child.ref.name}"
    if child.is_deleting:
        return Problem(
            Reason.NAME_TAKEN,
            f"{child.ref} is left over from a deleted object of the same name; Kubernetes is removing it. If it stays, "
            f"delete it: {delete}",
        )
    if child.labels.get(names.LABEL_NAME) == observed.key.name:
        return Problem(
            Reason.NAME_TAKEN,
            f"{child.ref} bears the label of this object and is not its own, as when a deleted object of the same name "
            f"left it over; it is left alone. Delete it: {delete}",
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
    if known == settled(wanted, child.body):
        return None
    if difference == "spec.replicas":
        # With its numbers, as each step of a rollout is another cause, and a fight over one number is the same again.
        return _resized(child, wanted["spec"]["replicas"])
    return f"{difference} differs"


def _resized(child: Child, replicas: int) -> str:
    return f"spec.replicas is {child.body['spec'].get('replicas', 1)} and has to be {replicas}"


def _prune(desired: set[Ref], rollout: RolloutState, observed: Observed, now: str) -> list[Delete]:
    """Return what is this object's and no longer wanted, in the opposite order of making."""
    retired, revision = rollout.retired, rollout.situation.target
    result: list[Delete] = []
    for child in _reversed_order(observed.children.values()):
        if child.ref in desired or child.is_deleting or not child.belongs_to(observed.uid):
            continue
        if child.ref.kind in WORKLOAD_KINDS and child.revision not in (None, revision):
            why = retired.get(child.revision or "")
            if why is not None and (is_router(child) or not routers_remain(observed, child.revision or "", now)):
                result.append(Delete(child.ref, child.uid, why))
        else:
            result.append(Delete(child.ref, child.uid, "not wanted any more"))
    return result


def _reversed_order(children: Iterable[Child]) -> list[Child]:
    return sorted(children, key=lambda child: (-_KIND_ORDER.get(child.ref.kind, 0), child.ref.name))
