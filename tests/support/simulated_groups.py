"""LeaderWorkerSet's controller for the simulated API server: groups of pods, ready at once, and no more than that."""

from typing import Any

from dcp_operator import names
from dcp_operator.kinds import LEADER_WORKER_SET, POD
from tests.support.simulated_api import SimulatedApi

Body = dict[str, Any]


def run_groups(api: SimulatedApi) -> None:
    """Give every LeaderWorkerSet the groups that it asks for, and report. Pods that exist stay as they are."""
    for body in [body for place, body in api.objects.items() if place[0] == LEADER_WORKER_SET.kind]:
        _run(api, body)


def _run(api: SimulatedApi, workload: Body) -> None:
    metadata, spec = workload["metadata"], workload["spec"]
    namespace, name, replicas = metadata["namespace"], metadata["name"], spec["replicas"]
    for place, pod in list(api.objects.items()):
        labels = pod["metadata"].get("labels", {})
        if place[0] == POD.kind and labels.get(names.LABEL_GROUP_SET) == name and _number(labels) >= replicas:
            api.remove(*place)
    groups = spec["leaderWorkerTemplate"]
    for number in range(replicas):
        leader = _pod(api, workload, groups["leaderTemplate"], number, 0, metadata["uid"])
        for worker in range(1, groups["size"]):
            _pod(api, workload, groups["workerTemplate"], number, worker, leader["metadata"]["uid"])
    leaders = [api.objects[POD.kind, namespace, f"{name}-{number}"] for number in range(replicas)]
    workload["status"] = {
        "observedGeneration": metadata["generation"],
        "replicas": replicas,
        "updatedReplicas": replicas,
        "readyReplicas": sum(pod["status"]["conditions"][0]["status"] == "True" for pod in leaders),
    }
    metadata["resourceVersion"] = str(next(api._versions))


def _number(labels: Body) -> int:
    return int(labels[names.LABEL_GROUP_INDEX])


def _pod(api: SimulatedApi, workload: Body, template: Body, number: int, worker: int, owner: str) -> Body:
    name, namespace = workload["metadata"]["name"], workload["metadata"]["namespace"]
    own = f"{name}-{number}" if worker == 0 else f"{name}-{number}-{worker}"
    found = api.objects.get((POD.kind, namespace, own))
    if found is not None:
        return found
    groups = {
        names.LABEL_GROUP_SET: name,
        names.LABEL_GROUP_INDEX: str(number),
        names.LABEL_WORKER_INDEX: str(worker),
    }
    size = str(workload["spec"]["leaderWorkerTemplate"]["size"])
    return api.put(
        {
            "kind": POD.kind,
            "metadata": {
                "name": own,
                "namespace": namespace,
                "labels": {**template["metadata"]["labels"], **groups},
                "annotations": {names.ANNOTATION_GROUP_SIZE: size},
                "ownerReferences": [{"uid": owner}],
            },
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
    )
