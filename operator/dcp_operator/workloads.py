"""How far the workloads of one revision are, read from their Deployments and pods."""

from dataclasses import dataclass

from dcp_operator import names
from dcp_operator.kinds import LEADER_WORKER_SET
from dcp_operator.observed import Body, Child, Observed, entries, section

#: Labels that tell from which state of a template a pod is made: Deployment's, and LeaderWorkerSet's.
_TEMPLATE_HASHES = ("pod-template-hash", "leaderworkerset.sigs.k8s.io/template-revision-hash")


@dataclass(frozen=True, slots=True)
class ComponentState:
    """Pods of one component of one revision, beside what its Deployment asks for."""

    component: str
    revision: str
    exists: bool
    #: Pods that the Deployment asks for.
    wanted: int
    #: Pods that exist, without those being removed.
    replicas: int
    ready: int
    #: Whether Kubernetes has acted on the newest template and every pod is made from it.
    is_current: bool
    pods: tuple[Body, ...]
    #: Pods that ended for good, by eviction for example, and that Kubernetes has not yet cleared away.
    failed: tuple[Body, ...]
    deployment: Child | None

    @property
    def is_complete(self) -> bool:
        """Whether every wanted pod is ready and made from the newest template, and no other is left."""
        return self.exists and self.is_current and self.ready >= self.wanted == self.replicas

    @property
    def serves(self) -> bool:
        """Whether at least one pod is ready."""
        return self.ready > 0


def component_state(observed: Observed, component: str, revision: str) -> ComponentState:
    """Return how far one component of a revision is."""
    deployment = observed.workload(component, revision)
    pods = pods_of(observed, component, revision)
    spec: Body = deployment.body["spec"] if deployment is not None else {}
    return ComponentState(
        component=component,
        revision=revision,
        exists=deployment is not None and not deployment.is_deleting,
        wanted=spec.get("replicas", 1) if deployment is not None else 0,
        replicas=len(pods),
        ready=sum(is_ready(pod) for pod in pods),
        is_current=deployment is not None and _is_current(deployment, pods),
        pods=pods,
        failed=_failed_pods(observed, component, revision),
        deployment=deployment,
    )


def revision_states(observed: Observed, revision: str) -> dict[str, ComponentState]:
    """Return how far every component of a revision is, in the order of reports."""
    return {component: component_state(observed, component, revision) for component in names.COMPONENTS}


def revision_is_complete(states: dict[str, ComponentState]) -> bool:
    """Whether a revision is rolled out. Routers without a pair of engines can't be ready, and aren't waited for."""
    engines = [state for component, state in states.items() if component != names.ROUTER]
    router = states[names.ROUTER]
    can_serve = all(state.wanted > 0 for state in engines)
    return all(state.is_complete for state in engines) and (router.is_complete or (router.exists and not can_serve))


def pods_of(observed: Observed, component: str | None = None, revision: str | None = None) -> tuple[Body, ...]:
    """Return the pods of a component and revision (or of all) that run or will run, in the order of their names."""
    found = [
        pod
        for pod in observed.pods
        if "deletionTimestamp" not in pod["metadata"]
        and section(pod, "status").get("phase") not in ("Succeeded", "Failed")
        and _is_of(pod, component, revision)
    ]
    return tuple(sorted(found, key=lambda pod: pod["metadata"]["name"]))


def _failed_pods(observed: Observed, component: str, revision: str) -> tuple[Body, ...]:
    """Return the pods of a component that ended for good, the newest last."""
    found = [
        pod
        for pod in observed.pods
        if section(pod, "status").get("phase") == "Failed" and _is_of(pod, component, revision)
    ]
    return tuple(sorted(found, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"])))


def _is_of(pod: Body, component: str | None, revision: str | None) -> bool:
    wanted = {names.LABEL_ROLE: component, names.LABEL_REVISION: revision}
    return all(value is None or labels_of(pod).get(key) == value for key, value in wanted.items())


def labels_of(body: Body) -> dict[str, str]:
    """Return metadata.labels."""
    return section(body, "metadata", "labels")


def is_ready(pod: Body) -> bool:
    """Whether a pod's Ready condition is True."""
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in entries(pod, "status", "conditions")
    )


def is_scheduled(pod: Body) -> bool:
    """Whether a pod has a node. One that runs has one, whatever its conditions say."""
    return section(pod, "status").get("phase") == "Running" or any(
        condition.get("type") == "PodScheduled" and condition.get("status") == "True"
        for condition in entries(pod, "status", "conditions")
    )


def _is_current(deployment: Child, pods: tuple[Body, ...]) -> bool:
    """Whether the Deployment's controller has seen the newest spec and all pods are made from its template.

    The pods are asked themselves, too, whether there are two kinds of them: their events can come before the
    Deployment's own count.
    """
    status = section(deployment.body, "status")
    spec: Body = deployment.body["spec"]
    # Releases of LeaderWorkerSet before 0.9 don't say which generation they have seen.
    tells = "observedGeneration" in status or deployment.ref.kind != LEADER_WORKER_SET.kind
    if tells and status.get("observedGeneration", 0) < deployment.body["metadata"].get("generation", 0):
        return False
    if status.get("updatedReplicas", 0) < spec.get("replicas", 1):
        return False
    return len({tuple(labels_of(pod).get(label) for label in _TEMPLATE_HASHES) for pod in pods}) <= 1
