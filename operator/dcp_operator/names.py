"""Every name, label, annotation, port and hash that the operator puts into the cluster: their one home."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dcp_operator.settings import Role

#: Server-side apply's name for what this operator owns in an object.
FIELD_MANAGER = "dcp-operator"

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
#: Fingerprint of the control channel's key in a pod template: pods are replaced when the key changes.
ANNOTATION_KEY = "dcpdisagg.io/kv-key"

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

#: The role value of the router's pods, beside those of `Role`.
ROUTER = "router"
#: Components that have a workload per revision, in the order of reports.
COMPONENTS = (Role.PREFILL.value, Role.DECODE.value, ROUTER)

#: Characters of a revision: 32 bits of a SHA-256.
REVISION_LENGTH = 8
#: Longest label value and longest Service name.
MAX_LABEL_LENGTH = 63


def workload(name: str, component: str, revision: str) -> str:
    """Return the name of one revision's Deployment of a component (prefill, decode or router)."""
    return f"{name}-{component}-{revision}"


def router_account(name: str) -> str:
    """Return the name of the router's ServiceAccount, Role and RoleBinding."""
    return f"{name}-router"


def key_secret(name: str) -> str:
    """Return the name of the Secret with the control channel's key."""
    return f"{name}-kv"


def public_service(name: str) -> str:
    """Return the name of the Service that clients talk to."""
    return name


def longest_suffix() -> int:
    """Return how many characters the longest derived name adds to the object's name."""
    return max(len(workload("", component, "0" * REVISION_LENGTH)) for component in COMPONENTS)


def max_name_length() -> int:
    """Return the longest object name whose derived names all fit into a label value, in characters."""
    return MAX_LABEL_LENGTH - longest_suffix()


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


def key_fingerprint(key: str) -> str:
    """Return a short hash of the control channel's key that tells two keys apart and reveals neither."""
    return hashlib.sha256(b"dcp-disagg kv key:" + key.encode()).hexdigest()[:16]
