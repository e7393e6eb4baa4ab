"""Why pods are not ready, read from what Kubernetes says about them and put into words with what to do."""

import re
from collections.abc import Iterable
from typing import Final

from dcp_operator import names
from dcp_operator.groups import group_trouble, workers_of
from dcp_operator.kinds import LEADER_WORKER_SET
from dcp_operator.last_words import cut, last_words, model_failure
from dcp_operator.observed import Body, entries, section
from dcp_operator.reasons import Problem, Reason
from dcp_operator.workloads import ComponentState, is_ready

_PULL_REASONS: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
_REFUSED_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError"}
)
#: Retries alternate between two texts for one cause; without what differs the message stays the same.
_PULL_NOISE: Final = re.compile(r'^(Back-off pulling image "[^"]*": )?(ErrImagePull: )?')
_NO_CONNECTOR: Final = re.compile(r"No module named '?dcp_connector")
#: How the scheduler says what no node has enough of.
_INSUFFICIENT: Final = re.compile(r"Insufficient ([\w./-]*\w)")


def component_problem(state: ComponentState, namespace: str) -> Problem | None:
    """Return the worst of what keeps a component from being complete, None if nothing does."""
    if state.is_complete:
        return None
    if state.deployment is not None:
        refused = _refused_pods(state.deployment.body, state.component)
        if refused is not None and state.replicas < state.wanted:
            return refused
    template = _pod_spec(state.deployment.body) if state.deployment is not None else {}
    members = (member for pod in state.pods for member in (pod, *workers_of(pod)))
    problems = (pod_problem(pod, state.component, namespace, template) for pod in members)
    found = [problem for problem in problems if problem is not None]
    worst = min(
        found,
        key=lambda problem: problem.reason.rank,
        default=Problem(Reason.PODS_PENDING, _who_makes_pods(state)),
    )
    # A replacement that only takes its time says nothing of why one was needed.
    before = _ended_before(state.failed) if worst.reason.is_progress else ""
    return Problem(
        worst.reason, f"{state.ready} of {state.wanted} {state.component} pods are ready; {worst.message}{before}"
    )


def _who_makes_pods(state: ComponentState) -> str:
    """Return what is waited for where no pod says anything."""
    workload = state.deployment
    if workload is not None and workload.ref.kind == LEADER_WORKER_SET.kind and not section(workload.body, "status"):
        return f"LeaderWorkerSet's controller has not acted on {workload.ref.name} yet; see whether it runs"
    return "Kubernetes is making or replacing pods"


def _ended_before(failed: tuple[Body, ...]) -> str:
    """Return how the newest of the pods that ended for good did so, as the end of a message."""
    if not failed:
        return ""
    name, status = failed[-1]["metadata"]["name"], section(failed[-1], "status")
    said = ": ".join(words for key in ("reason", "message") if (words := status.get(key)))
    return f". Before, pod {name} ended for good: {cut(said) or 'no reason given'}"


def pod_problem(pod: Body, component: str, namespace: str, template: Body | None = None) -> Problem | None:
    """Return why a pod is not ready, None if it is. `template` is the pod's spec, where its workload is known."""
    name = pod["metadata"]["name"]
    if is_ready(pod):
        return None
    apart = group_trouble(pod)
    if apart is not None:
        return Problem(Reason.PODS_PENDING, f"pod {name} leads a group that is one engine, and {apart}")
    status = section(pod, "status")
    containers = list(_containers(status))
    checks = (
        _pull_problem(name, containers),
        _refused_problem(name, containers),
        _crash_problem(name, containers, namespace),
        _unschedulable(name, status, template or {}),
        _not_counted(name, status),
        _not_answering(name, status, component, namespace),
    )
    for problem in checks:
        if problem is not None:
            return problem
    return Problem(Reason.PODS_PENDING, f"pod {name} is being set up on its node (volumes, network, images)")


def _containers(status: Body) -> Iterable[tuple[Body, bool]]:
    """Return the states of init containers, then of containers; the flag marks the former."""
    for entry in entries(status, "initContainerStatuses"):
        yield entry, True
    for entry in entries(status, "containerStatuses"):
        yield entry, False


def _pull_problem(name: str, containers: list[tuple[Body, bool]]) -> Problem | None:
    for entry, _ in containers:
        waiting = _waiting(entry)
        if waiting.get("reason") in _PULL_REASONS:
            words = _PULL_NOISE.sub("", waiting.get("message") or waiting["reason"])
            return Problem(
                Reason.IMAGE_PULL_FAILED,
                f"pod {name} can't get the image {entry.get('image')} of container {entry['name']}: {cut(words)}. "
                "Check the image's name and the pull secrets (template.spec.imagePullSecrets)",
            )
    return None


def _refused_problem(name: str, containers: list[tuple[Body, bool]]) -> Problem | None:
    for entry, _ in containers:
        waiting = _waiting(entry)
        if waiting.get("reason") in _REFUSED_REASONS:
            words = cut(waiting.get("message") or waiting["reason"])
            return Problem(Reason.CONTAINER_REFUSED, f"pod {name} can't start its container {entry['name']}: {words}")
    return None


def _crash_problem(name: str, containers: list[tuple[Body, bool]], namespace: str) -> Problem | None:
    for entry, is_init in containers:
        ended = failed_end(entry)
        if ended is None or (is_init and entry.get("ready")):
            continue
        message: str = ended.get("message") or ""
        words = last_words(message) or f"exit code {ended.get('exitCode')}, reason {ended.get('reason', 'unknown')}"
        container = entry["name"]
        is_connector = is_init and container == names.CONTAINER_CONNECTOR
        if is_connector or _NO_CONNECTOR.search(message):
            cure = (
                "the operator image must hold the connector; check the operator's own image"
                if is_connector
                else "use an engine image that has dcp_connector installed, or set kvConnector.delivery to Inject"
            )
            return Problem(
                Reason.CONNECTOR_MISSING,
                f"the KV connector is missing in pod {name}, container {container}: {words}. What to do: {cure}",
            )
        log = f"The whole log: kubectl -n {namespace} logs {name} -c {container} --previous"
        failure = model_failure(message, words) if container == names.CONTAINER_MAIN else None
        if failure is not None:
            return Problem(
                Reason.MODEL_LOAD_FAILED,
                f"the engine in pod {name} can't load the model, because {failure.what}: {words}. What to do: "
                f"{failure.cure}. {log}",
            )
        return Problem(
            Reason.CRASH_LOOP,
            f"container {container} of pod {name} failed with exit code {ended.get('exitCode')} after "
            f"{_count(entry.get('restartCount', 0), 'restart')}: {words}. {log}",
        )
    return None


def _unschedulable(name: str, status: Body, template: Body) -> Problem | None:
    for condition in entries(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            said: str = condition.get("message") or condition.get("reason") or "no reason given"
            short = "; ".join(_shortages(said, template))
            between = f"{short}. The scheduler says: " if short else ""
            return Problem(
                Reason.UNSCHEDULABLE,
                f"no node can take pod {name}: {between}{cut(said).rstrip('.')}. Free or add what is missing, "
                "or ask for less",
            )
    return None


def _shortages(said: str, template: Body) -> Iterable[str]:
    """Yield each resource that is short, and how much of it the pod asks for."""
    for resource in dict.fromkeys(_INSUFFICIENT.findall(said)):
        asked = [
            f"{amount} in container {container['name']}"
            for kind in ("initContainers", "containers")
            for container in entries(template, kind)
            if (amount := _requested(container, resource)) is not None
        ]
        yield f"too little {resource} is free" + (f", of which it asks for {' and '.join(asked)}" if asked else "")


def _requested(container: Body, resource: str) -> str | None:
    """Return how much of a resource a container asks for, as it is written; a limit alone is a request too."""
    for kind in ("requests", "limits"):
        amount = section(container, "resources", kind).get(resource)
        if amount is not None:
            return str(amount)
    return None


def _pod_spec(workload: Body) -> Body:
    """Return the pods' spec of a Deployment, or of the workers of a LeaderWorkerSet."""
    return section(workload, "spec", "template", "spec") or section(
        workload, "spec", "leaderWorkerTemplate", "workerTemplate", "spec"
    )


def _not_counted(name: str, status: Body) -> Problem | None:
    """Return why a pod is not ready whose containers all are.

    That is the kubelet's word on them, its last one where the node has gone: Kubernetes then turns the pod's Ready to
    False and leaves the rest as it was (MarkPodsNotReady in pkg/controller/util/node of Kubernetes).
    """
    conditions = {condition.get("type"): condition for condition in entries(status, "conditions")}
    if conditions.get("ContainersReady", {}).get("status") != "True":
        return None
    ready = conditions.get("Ready", {})
    if ready.get("reason") == "ReadinessGatesNotReady":
        said = cut(ready.get("message") or "no reason given")
        return Problem(
            Reason.PODS_PENDING, f"the containers of pod {name} are ready, its readiness gates are not: {said}"
        )
    return Problem(
        Reason.NODE_LOST,
        f"the node of pod {name} doesn't answer any more. Kubernetes replaces a pod that it gives up: after "
        "five minutes unless tolerations say otherwise, or as soon as the Node is deleted. See which node it is with "
        f"kubectl get pod {name} -o wide",
    )


def _not_answering(name: str, status: Body, component: str, namespace: str) -> Problem | None:
    running = [entry for entry, is_init in _containers(status) if not is_init and "running" in section(entry, "state")]
    main = next((entry for entry in running if entry["name"] == names.CONTAINER_MAIN), None)
    if main is None:
        return None
    if component == names.ROUTER:
        return Problem(
            Reason.WAITING_FOR_ENGINES,
            f"router pod {name} runs and waits for a ready engine of each role of its revision",
        )
    if not main.get("started"):
        return Problem(Reason.STARTING, f"the engine in pod {name} is starting: it loads the model and opens its ports")
    if not _was_ready(status, main):
        return Problem(Reason.STARTING, f"the engine in pod {name} has started; its first readiness probe is awaited")
    return Problem(
        Reason.PROBE_FAILED,
        f"the engine in pod {name} has started and its readiness probe fails: engine or KV connector does not answer. "
        f"See kubectl -n {namespace} describe pod {name}",
    )


def _was_ready(status: Body, main: Body) -> bool:
    """Whether a pod that is not ready was ready since its container started: only then its condition is younger."""
    since = section(main, "state", "running").get("startedAt", "")
    ready = [condition for condition in entries(status, "conditions") if condition.get("type") == "Ready"]
    return any(condition.get("lastTransitionTime", "") > since for condition in ready)


def _refused_pods(deployment: Body, component: str) -> Problem | None:
    """Return why Kubernetes makes no pods: a quota, a limit range, pod security."""
    for condition in entries(deployment, "status", "conditions"):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            words = cut(condition.get("message") or condition.get("reason") or "no reason given")
            return Problem(Reason.PODS_REFUSED, f"Kubernetes refuses to make {component} pods: {words}")
    return None


def failed_end(entry: Body) -> Body | None:
    """Return how a container ended if it failed and has not recovered. A restart that runs is not yet a recovery."""
    last = section(entry, "lastState", "terminated")
    for ended in (section(entry, "state", "terminated"), last):
        if ended.get("exitCode", 0) != 0:
            return ended
    # An engine that ends by itself without an error is in a loop all the same.
    return last if last and _waiting(entry).get("reason") == "CrashLoopBackOff" else None


def _waiting(entry: Body) -> Body:
    return section(entry, "state", "waiting")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
