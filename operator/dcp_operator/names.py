"""Every name, label, annotation, port and hash that the operator puts into the cluster: their one home."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dcp_operator.settings import Role

#: Server-side apply's name for what this operator owns in an object.
FIELD_MANAGER = "dcp-operator"
#: The same for what it gives an object once, when it makes it: never owned by its applies, so never taken back.
FIELD_MANAGER_ONCE = "dcp-operator-once"
#: The same for what `dcpctl` changes.
FIELD_MANAGER_CLI = "dcpctl"

#: Value of app.kubernetes.io/managed-by, and the `reportingComponent` of events.
OPERATOR = "dcp-operator"

# --- labels ---------------------------------------------------------------------------------------------------------
LABEL_NAME = "dcpdisagg.io/name"
LABEL_ROLE = "dcpdisagg.io/role"
LABEL_REVISION = "dcpdisagg.io/revision"
#: Read by llm-d's scheduler, so that its pods can be used without this project's router.
LABEL_LLMD_ROLE = "llm-d.ai/role"

# --- annotations ----------------------------------------------------------------------------------------------------
#: Hash of the manifest that was applied last: notices a field that the operator no longer sets.
ANNOTATION_DESIRED = "dcpdisagg.io/desired-hash"
#: Pull policy and name of the operator image that a revision's pods were created with.
ANNOTATION_OPERATOR_IMAGE = "dcpdisagg.io/operator-image"

#: Groups of a LeaderWorkerSet that were made anew: how often, and when last (`dcp_operator.group_restarts`).
ANNOTATION_GROUP_RESTARTS = "dcpdisagg.io/group-restarts"

# --- LeaderWorkerSet's own words ------------------------------------------------------------------------------------
#: Labels of every pod of a group: its LeaderWorkerSet, the group's number there, the pod's number in the group.
LABEL_GROUP_SET = "leaderworkerset.sigs.k8s.io/name"
LABEL_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
LABEL_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
#: Annotation of every pod of a group: the number of pods in it.
ANNOTATION_GROUP_SIZE = "leaderworkerset.sigs.k8s.io/size"
#: Variables of every container of a group: the name under which its leader is found, and the pod's number in it.
ENV_LEADER_ADDRESS = "LWS_LEADER_ADDRESS"
ENV_WORKER_INDEX = "LWS_WORKER_INDEX"

# --- containers, volumes, paths -------------------------------------------------------------------------------------
CONTAINER_MAIN = "main"
CONTAINER_CONNECTOR = "connector"
VOLUME_CONNECTOR = "dcp-connector"
VOLUME_KEY = "dcp-kv-key"
VOLUME_SHM = "dshm"
VOLUME_MODEL = "model"
VOLUME_TMP = "tmp"
PATH_CONNECTOR = "/dcp-connector"
#: Where the operator image keeps the connector package.
PATH_CONNECTOR_SOURCE = "/opt/dcp/connector"
PATH_KEY = "/etc/dcp-kv"
PATH_SHM = "/dev/shm"  # noqa: S108 - a mount point in the container
PATH_MODELS = "/models"
#: Key of the Secret, and so the file's name below PATH_KEY.
SECRET_KEY = "key"  # noqa: S105 - the name of a key, not a secret

# --- ports ----------------------------------------------------------------------------------------------------------
PORT_PUBLIC = 80
PORT_ROUTER = 8080
PORT_ROUTER_METRICS = 29000
PORT_NAME_HTTP = "http"
PORT_NAME_BOOTSTRAP = "kv-bootstrap"
PORT_NAME_METRICS = "metrics"
#: Where the pods of a multi-node engine meet.
PORT_NAME_GROUP = "group"

#: The role value of the pods that pull a model, beside those of `Role`.
MODEL = "model"
#: The role value of the router's pods, beside those of `Role`.
ROUTER = "router"
#: Components that have a workload per revision, in the order of reports.
COMPONENTS = (Role.PREFILL.value, Role.DECODE.value, ROUTER)

#: Characters of a revision: 32 bits of a SHA-256.
REVISION_LENGTH = 8
#: Characters of the hash in the name of a ControllerRevision.
HISTORY_LENGTH = 10
#: Longest label value and longest Service name.
MAX_LABEL_LENGTH = 63
#: What Kubernetes adds to a group's workload: the number of the group, and the hash of a StatefulSet's revision.
_GROUP_SUFFIX = len("-9999-") + 10


def workload(name: str, component: str, revision: str) -> str:
    """Return the name of one revision's Deployment of a component (prefill, decode or router)."""
    return f"{name}-{component}-{revision}"


def worker_component(role: str) -> str:
    """Return the component of the pods of a multi-node engine beside its leader.

    It is not the role: routers, Services and budgets select engines by their role, and an engine answers at its leader.
    """
    return f"{role}-worker"


def model_job(name: str, digest: str) -> str:
    """Return the name of the Job that pulls a model; `digest` is that of all that the Job is made from."""
    return f"{name}-{MODEL}-{digest}"


def router_account(name: str) -> str:
    """Return the name of the router's ServiceAccount, Role and RoleBinding."""
    return f"{name}-router"


def key_secret(name: str) -> str:
    """Return the name of the Secret with the control channel's key."""
    return f"{name}-kv"


def disruption_budget(name: str, role: str) -> str:
    """Return the name of a role's PodDisruptionBudget."""
    return f"{name}-{role}"


def engine_policy(name: str) -> str:
    """Return the name of the engines' NetworkPolicy."""
    return f"{name}-engines"


def router_policy(name: str) -> str:
    """Return the name of the routers' NetworkPolicy."""
    return f"{name}-routers"


def public_service(name: str) -> str:
    """Return the name of the Service that clients talk to."""
    return name


def scaler(name: str, role: Role) -> str:
    """Return the name of a role's scaler."""
    return f"{name}-{role}"


def history(name: str, state: Mapping[str, Any]) -> str:
    """Return the name of the ControllerRevision that keeps a state: equal states have equal names."""
    return f"{name}-{digest(state, HISTORY_LENGTH)}"


def longest_suffix(*, in_groups: bool = False) -> int:
    """Return how many characters the longest derived name adds to the object's name.

    `in_groups`: a role's engines span several pods. Kubernetes labels those with the revision of the StatefulSet that
    LeaderWorkerSet makes of each group, WORKLOAD-GROUP-HASH.
    """
    workloads = [workload("", component, "0" * REVISION_LENGTH) for component in COMPONENTS]
    others = [model_job("", "0" * REVISION_LENGTH), history("", {}), engine_policy(""), router_policy("")]
    group = _GROUP_SUFFIX if in_groups else 0
    return max(max(map(len, workloads)) + group, *map(len, others))


def max_name_length(*, in_groups: bool = False) -> int:
    """Return the longest object name whose derived names all fit into a label value, in characters."""
    return MAX_LABEL_LENGTH - longest_suffix(in_groups=in_groups)


def labels(name: str, component: str | None = None, revision: str | None = None) -> dict[str, str]:
    """Return the labels of a child; without component and revision those that every child has."""
    result = {
        "app.kubernetes.io/name": "dcp-disagg",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": OPERATOR,
        LABEL_NAME: name,
    }
    if component is not None:
        component = str(component)  # an enum's member would not survive serialisation
        result["app.kubernetes.io/component"] = component
        result[LABEL_ROLE] = component
        if component in (Role.PREFILL, Role.DECODE):
            result[LABEL_LLMD_ROLE] = component
    if revision is not None:
        result[LABEL_REVISION] = revision
    return result


def selector(name: str, component: str, revision: str | None = None) -> dict[str, str]:
    """Return the labels that select the pods of a component, of one revision or of all."""
    result = {LABEL_NAME: name, LABEL_ROLE: str(component)}
    if revision is not None:
        result[LABEL_REVISION] = revision
    return result


def digest(value: Mapping[str, Any], length: int = REVISION_LENGTH) -> str:
    """Return the first `length` hex digits of the SHA-256 of a JSON value; key order does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
