"""What the cluster holds for one object: a frozen snapshot that decisions are taken from."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from dcp_operator import names
from dcp_operator.kinds import (
    DEPLOYMENT,
    DEPLOYMENT_OF_ENGINES,
    LEADER_WORKER_SET,
    SCALER,
    SECRET,
    WORKLOAD_KINDS,
    Ref,
    ref_of,
)
from dcp_operator.settings import Role

Body = dict[str, Any]

#: metadata and status that change without anything of ours having changed.
_VOLATILE = frozenset({"resourceVersion", "managedFields", "generation", "creationTimestamp"})


def section(body: Body, *path: str) -> Body:
    """Return the mapping at a path, empty where it or anything on the way is absent."""
    for key in path:
        body = cast("Body", body.get(key) or {})
    return body


def entries(body: Body, *path: str) -> list[Body]:
    """Return the list of mappings at a path, empty where it or anything on the way is absent."""
    return cast("list[Body]", section(body, *path[:-1]).get(path[-1]) or [])


class Key(NamedTuple):
    """One DCPDisaggDeployment: the key of queues and caches."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Child:
    """One object that the operator made, or one that has the name of such an object."""

    body: Body = field(repr=False)

    @property
    def ref(self) -> Ref:
        """Kind and name."""
        return ref_of(self.body)

    @property
    def uid(self) -> str:
        """metadata.uid."""
        return self.body["metadata"].get("uid", "")

    @property
    def labels(self) -> Mapping[str, str]:
        """metadata.labels."""
        return section(self.body, "metadata", "labels")

    @property
    def annotations(self) -> Mapping[str, str]:
        """metadata.annotations."""
        return section(self.body, "metadata", "annotations")

    @property
    def revision(self) -> str | None:
        """The revision that it belongs to, for workloads: from the selector, which nobody can change.

        A LeaderWorkerSet has no selector, so that its label has to do.
        """
        holder = self.labels if self.ref.kind == LEADER_WORKER_SET.kind else self._selected
        return holder.get(names.LABEL_REVISION)

    @property
    def component(self) -> str | None:
        """The component whose pods it runs, for workloads."""
        return self._selected.get(names.LABEL_ROLE) or self.labels.get(names.LABEL_ROLE)

    @property
    def _selected(self) -> Mapping[str, str]:
        return section(self.body, "spec", "selector", "matchLabels")

    @property
    def is_deleting(self) -> bool:
        """Whether Kubernetes is removing it already."""
        return "deletionTimestamp" in self.body["metadata"]

    def belongs_to(self, uid: str) -> bool:
        """Whether the object with this uid is its controller."""
        return controller_of(self.body).get("uid") == uid

    def is_left_over(self, name: str, uid: str) -> bool:
        """Whether its controller had the name that the object with this uid has now, so that the controller is gone."""
        owner = controller_of(self.body)
        return (
            (owner.get("kind"), owner.get("name")) == (DEPLOYMENT_OF_ENGINES.kind, name)
            and str(owner.get("apiVersion")).partition("/")[0] == DEPLOYMENT_OF_ENGINES.group
            and owner.get("uid") != uid
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """What the API server made of a manifest: applying the same to the same again changes nothing."""

    desired: str
    essence: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything read about one object; bodies are as the API server sent them."""

    body: Body = field(repr=False)
    children: Mapping[Ref, Child] = field(default_factory=dict[Ref, Child])
    #: Pods; of an engine that is a group of pods its leader, Ready only while all are (`dcp_operator.groups`).
    pods: tuple[Body, ...] = field(default=(), repr=False)
    #: Key of the control channel as it was seen last, base64: restored when the Secret is deleted.
    remembered_key: str | None = field(default=None, repr=False)
    settled: Mapping[Ref, Settled] = field(default_factory=dict[Ref, Settled], repr=False)
    #: Ports of nodes that other objects have.
    ports_of_others: frozenset[int] = field(default=frozenset(), repr=False)
    #: Kinds of children that can't be made now, and why: the API server doesn't know them, or keeps them from us.
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return Key(self.body["metadata"]["namespace"], self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """metadata.uid."""
        return self.body["metadata"]["uid"]

    @property
    def generation(self) -> int:
        """metadata.generation: rises with every change of the spec."""
        return self.body["metadata"].get("generation", 0)

    @property
    def is_deleting(self) -> bool:
        """Whether the object itself is being removed."""
        return "deletionTimestamp" in self.body["metadata"]

    @property
    def status(self) -> Body:
        """The status as it is stored."""
        return section(self.body, "status")

    def workloads(self) -> list[Child]:
        """Return what runs this object's pods, of all revisions, in a fixed order."""
        found = [child for ref, child in self.children.items() if ref.kind in WORKLOAD_KINDS]
        return sorted((child for child in found if child.belongs_to(self.uid)), key=lambda child: child.ref)

    def workload(self, component: str, revision: str) -> Child | None:
        """Return what runs one revision's pods of a component, if it exists and is this object's."""
        name = names.workload(self.key.name, component, revision)
        found = (self.children.get(Ref(kind, name)) for kind in WORKLOAD_KINDS)
        return next((child for child in found if child is not None and child.belongs_to(self.uid)), None)

    def scaler(self, role: Role) -> Child | None:
        """Return the scaler of a role, if it exists and is this object's."""
        child = self.children.get(Ref(SCALER.kind, names.scaler(self.key.name, role)))
        return child if child is not None and child.belongs_to(self.uid) and not child.is_deleting else None

    def kv_key(self) -> str | None:
        """Return the control channel's key as base64: the Secret's, else the one seen last."""
        child = self.children.get(Ref(SECRET.kind, names.key_secret(self.key.name)))
        if child is not None and child.belongs_to(self.uid):
            stored = stored_key(child.body)
            if stored is not None:
                return stored
        return self.remembered_key


def controller_of(body: Body) -> Body:
    """Return the owner reference to the controller, of which Kubernetes allows one; empty where there is none."""
    none: Body = {}
    owners = entries(body, "metadata", "ownerReferences")
    return next((owner for owner in owners if owner.get("controller")), none)


def stored_key(secret: Body) -> str | None:
    """Return the key in a Secret as base64, or None where it is missing or blank."""
    value: str | None = section(secret, "data").get(names.SECRET_KEY)
    try:
        return value if value and base64.b64decode(value).strip() else None
    except (binascii.Error, ValueError):
        return None


def essence(body: Body) -> Body:
    """Return an object without what changes by itself: two equal essences are the same object to the operator."""
    metadata = {key: value for key, value in body["metadata"].items() if key not in _VOLATILE}
    rest = {key: value for key, value in body.items() if key not in ("metadata", "status")}
    if body.get("kind") == DEPLOYMENT.kind:
        annotations = section(metadata, "annotations")
        # Counted up by Kubernetes with every change of the template.
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != "deployment.kubernetes.io/revision"}
    return {**rest, "metadata": metadata}
