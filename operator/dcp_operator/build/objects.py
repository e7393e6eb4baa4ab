"""What every manifest has in common: the metadata of a child."""

from dataclasses import dataclass, field
from typing import Any

from dcp_operator import names
from dcp_operator.api.base import API_VERSION, KIND
from dcp_operator.api.spec import Spec
from dcp_operator.settings import Role

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """What manifests are rendered from. Nothing in it changes while nothing in the cluster is changed."""

    name: str
    namespace: str
    spec: Spec
    #: Image of the router and of the init container that brings the connector, with its pull policy.
    operator_image: str
    pull_policy: str = "IfNotPresent"
    #: metadata.uid of the object; None renders manifests without an owner, to be read or applied by hand.
    uid: str | None = None
    #: The control channel's key, base64; None leaves the Secret empty.
    kv_key: str | None = field(default=None, repr=False)
    #: Engines that are asked for by role, for roles that are left to an autoscaler (`dcp_operator.rollout.asked`).
    asked: dict[Role, int] = field(default_factory=dict[Role, int])
    #: Namespace that the operator runs in, which its pods connect from; None where it runs outside of the cluster.
    operator_namespace: str | None = None
    #: First port of the revision's block on nodes, for roles on the host's network; None renders that of any block.
    host_ports: int | None = None


def metadata(
    context: Context, name: str, component: str | None = None, revision: str | None = None, **annotations: str
) -> Manifest:
    """Return the metadata of a child: name, namespace, labels and the reference that makes it go with its owner."""
    result: Manifest = {
        "name": name,
        "namespace": context.namespace,
        "labels": names.labels(context.name, component, revision),
    }
    if annotations:
        result["annotations"] = annotations
    if context.uid is not None:
        result["ownerReferences"] = [owner_reference(context.name, context.uid)]
    return result


def owner_reference(name: str, uid: str) -> Manifest:
    """Return the reference to the owning object: children are removed with it by Kubernetes, not by the operator."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
