"""The LeaderWorkerSet of a role whose engines span several pods, one per revision. A group of it is one engine.

What LeaderWorkerSet's webhook fills in is stated here, so that nothing is defaulted behind the operator's back. Its own
restart policy makes a group anew at once and without an end; the operator does that itself, with growing pauses
(`dcp_operator.group_restarts`), so it is None here.
"""

import copy
from typing import Any

from dcp_operator import names
from dcp_operator.api.spec import Multinode
from dcp_operator.build.group import worker_template
from dcp_operator.build.objects import Context, Manifest
from dcp_operator.build.workload import image_annotation
from dcp_operator.kinds import LEADER_WORKER_SET
from dcp_operator.ports import engine_ports
from dcp_operator.settings import Role


def leader_worker_set(
    context: Context,
    metadata: Manifest,
    *,
    multinode: Multinode,
    component: str,
    revision: str,
    replicas: int,
    rolling_update: dict[str, Any],
    template: Manifest,
) -> Manifest:
    """Return a LeaderWorkerSet that runs one revision of a role, the component; `template` is that of its leaders.

    Annotations of the spec go to the object and its pods: schedulers look for theirs on either. The operator's win.
    """
    role = Role(component)
    leader = _annotated(template, multinode)
    leader["metadata"]["labels"] |= {names.LABEL_REVISION: revision}
    worker = worker_template(context.spec, role, leader, engine_ports(context.spec, role, context.host_ports))
    annotations = {**multinode.annotations, names.ANNOTATION_OPERATOR_IMAGE: image_annotation(context)}
    return {
        "apiVersion": LEADER_WORKER_SET.api_version,
        "kind": LEADER_WORKER_SET.kind,
        "metadata": {**metadata, "annotations": annotations},
        "spec": {
            "replicas": replicas,
            # A leader is ready when its workers have joined it, so they can't be made after that.
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"partition": 0, **_possible(rolling_update, replicas)},
            },
            "leaderWorkerTemplate": {
                "size": multinode.node_count,
                "restartPolicy": "None",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
            "networkConfig": {"subdomainPolicy": "Shared"},
        },
    }


def _annotated(template: Manifest, multinode: Multinode) -> Manifest:
    result = copy.deepcopy(template)
    if multinode.annotations:
        metadata = result["metadata"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **multinode.annotations}
    return result


def _possible(rolling_update: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Return the bounds of a rolling update with at least one group to surge or to miss.

    A percentage of few groups can be none of them. A Deployment then takes one; LeaderWorkerSet refuses the object.
    """
    surge, unavailable = rolling_update["maxSurge"], rolling_update["maxUnavailable"]
    if surge in (0, "0%") and isinstance(unavailable, str):
        unavailable = max(1, int(unavailable.removesuffix("%")) * replicas // 100)
    return {"maxSurge": surge, "maxUnavailable": unavailable}
