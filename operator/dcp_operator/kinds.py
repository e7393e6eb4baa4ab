"""The kinds of objects that the operator makes and watches, with their place in the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dcp_operator.api.base import GROUP, KIND, PLURAL, SCALER_KIND, SCALER_PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object, as the API server's paths name it."""

    group: str
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        """The apiVersion of its manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection, of one object, or of its subresource."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


_RBAC = "rbac.authorization.k8s.io"

DEPLOYMENT_OF_ENGINES: Final = Kind(GROUP, VERSION, KIND, PLURAL)
SCALER: Final = Kind(GROUP, VERSION, SCALER_KIND, SCALER_PLURAL)
SECRET: Final = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT: Final = Kind("", "v1", "ServiceAccount", "serviceaccounts")
ROLE: Final = Kind(_RBAC, "v1", "Role", "roles")
ROLE_BINDING: Final = Kind(_RBAC, "v1", "RoleBinding", "rolebindings")
NETWORK_POLICY: Final = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
JOB: Final = Kind("batch", "v1", "Job", "jobs")
DISRUPTION_BUDGET: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
DEPLOYMENT: Final = Kind("apps", "v1", "Deployment", "deployments")
CONTROLLER_REVISION: Final = Kind("apps", "v1", "ControllerRevision", "controllerrevisions")
LEADER_WORKER_SET: Final = Kind("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets")
SERVICE: Final = Kind("", "v1", "Service", "services")
POD: Final = Kind("", "v1", "Pod", "pods")
EVENT: Final = Kind("", "v1", "Event", "events")

#: What the operator applies, in the order in which it does; what it prunes goes in the opposite order.
CHILD_KINDS: Final = (
    SECRET,
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
    JOB,
    DEPLOYMENT,
    SERVICE,
    SCALER,
    CONTROLLER_REVISION,
)

#: Kinds of children that a cluster need not have: watched where the API server knows them.
OPTIONAL_KINDS: Final = (LEADER_WORKER_SET,)

#: Kinds that run the pods of a revision.
WORKLOAD_KINDS: Final = (DEPLOYMENT.kind, LEADER_WORKER_SET.kind)

#: Fields that the operator gives a child when it makes it, and leaves alone from then on: an autoscaler owns the first,
#: and nobody may change the others: what an admission plugin adds to a Job's pods can only be left there.
GIVEN_ONCE: Final[Mapping[str, frozenset[str]]] = {
    SCALER.kind: frozenset({"spec"}),
    JOB.kind: frozenset({"spec"}),
    CONTROLLER_REVISION.kind: frozenset({"data"}),
}

_BY_KIND: Final = {kind.kind: kind for kind in (*CHILD_KINDS, *OPTIONAL_KINDS, POD, DEPLOYMENT_OF_ENGINES)}


class Ref(NamedTuple):
    """One child within the namespace of its owner."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def kind_named(kind: str) -> Kind:
    """Return the kind of a manifest; raises KeyError for one that the operator doesn't handle."""
    return _BY_KIND[kind]


def lasting(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what of a manifest the operator keeps up, without what it gives the object once."""
    once = GIVEN_ONCE.get(manifest["kind"], frozenset())
    return {key: value for key, value in manifest.items() if key not in once}


def ref_of(manifest: dict[str, Any]) -> Ref:
    """Return what a manifest is about."""
    return Ref(manifest["kind"], manifest["metadata"]["name"])
