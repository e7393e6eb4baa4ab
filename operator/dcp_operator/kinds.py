"""The kinds of objects that the operator makes and watches, with their place in the API."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dcp_operator.api.base import GROUP, KIND, PLURAL, VERSION


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
SECRET: Final = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT: Final = Kind("", "v1", "ServiceAccount", "serviceaccounts")
ROLE: Final = Kind(_RBAC, "v1", "Role", "roles")
ROLE_BINDING: Final = Kind(_RBAC, "v1", "RoleBinding", "rolebindings")
DEPLOYMENT: Final = Kind("apps", "v1", "Deployment", "deployments")
SERVICE: Final = Kind("", "v1", "Service", "services")
POD: Final = Kind("", "v1", "Pod", "pods")
EVENT: Final = Kind("", "v1", "Event", "events")

#: What the operator applies, in the order in which it does; what it prunes goes in the opposite order.
CHILD_KINDS: Final = (SECRET, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, DEPLOYMENT, SERVICE)

_BY_KIND: Final = {kind.kind: kind for kind in (*CHILD_KINDS, POD, DEPLOYMENT_OF_ENGINES)}


class Ref(NamedTuple):
    """One child within the namespace of its owner."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def kind_named(kind: str) -> Kind:
    """Return the kind of a manifest; raises KeyError for one that the operator doesn't handle."""
    return _BY_KIND[kind]


def ref_of(manifest: dict[str, Any]) -> Ref:
    """Return what a manifest is about."""
    return Ref(manifest["kind"], manifest["metadata"]["name"])
