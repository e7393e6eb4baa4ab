"""Objects and plain Deployments on fake nodes, in numbers, and what the operator's work on them costs.

Times begin with the ADDED event of the first object and end with the event that makes the last pod be there: what the
API server and its controllers need is in both the operator's times and the plain ones.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dcp_operator import names
from dcp_operator.api.base import API_VERSION, GROUP, KIND, PLURAL, VERSION
from dcp_operator.api.load import load
from dcp_operator.build import render
from dcp_operator.kinds import DEPLOYMENT
from devcluster.fake_nodes import place
from tests.support.cluster_watch import ApiServer, Seen

Body = dict[str, Any]
_GEOMETRY = {"attention": "gqa", "attentionHeads": 4, "kvHeads": 1, "layers": 4, "maxModelLen": 1024}
_IMAGE = "bench.invalid/engine:1"
#: Requests at the same time, as from a user with a script.
_CLIENTS = 8


def load_object(
    name: str, *, prefill: int = 1, decode: int = 1, ready_after_s: float = 0.0, args: Iterable[str] = ()
) -> Body:
    """Return an object whose pods go to fake nodes; engines are Ready after a time, routers at once."""
    template = place({"spec": {"containers": [{"name": "main", "command": ["engine"]}]}}, ready_after_s)
    role = {"blockSize": 32, "template": template, "extraArgs": list(args)}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "hf://acme/tiny", "geometry": _GEOMETRY},
            "image": _IMAGE,
            "accelerator": {"resourceName": "cpu"},
            "kvConnector": {"protocol": "tcp"},
            "prefill": {**role, "replicas": prefill, "parallelism": {"tensor": 1}},
            "decode": {**role, "replicas": decode, "parallelism": {"tensor": 2, "decodeContext": 2}},
            "router": {"replicas": 1, "template": place({})},
            # Nothing answers at a fake pod's address.
            "transferCheck": {"enabled": False},
        },
    }


def plain_deployment(name: str, replicas: int, *, ready_after_s: float = 0.0, **env: str) -> Body:
    """Return a Deployment with the same name label as an object's pods have."""
    labels = {names.LABEL_NAME: name}
    main = {"name": "main", "image": _IMAGE, "env": [{"name": key, "value": value} for key, value in env.items()]}
    template = place({"metadata": {"labels": labels}, "spec": {"containers": [main]}}, ready_after_s)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": template,
        },
    }


def same_deployments(name: str) -> list[Body]:
    """Return the Deployments that `load_object` of this name becomes, as somebody would apply them without an operator.

    What the API server, its controllers and the nodes need for a pod depends on what the pod says, so an operator's
    work is what comes on top of the very same pods.
    """
    loaded = load(load_object(name))
    assert loaded.obj is not None
    rendered = render(name, "default", loaded.obj.spec, operator_image=_IMAGE)
    deployments = [manifest for manifest in rendered if manifest["kind"] == DEPLOYMENT.kind]
    for deployment in deployments:
        deployment["metadata"] = {"name": deployment["metadata"]["name"]}
        # Nobody makes the account, and without it no pod is made.
        deployment["spec"]["template"]["spec"].pop("serviceAccountName", None)
    return deployments


@dataclass
class Pods:
    """The pods of a namespace as a watch tells of them: when each was added and when it was Ready, by name."""

    added: dict[str, float] = field(default_factory=dict[str, float])
    ready: dict[str, float] = field(default_factory=dict[str, float])
    deleted: dict[str, float] = field(default_factory=dict[str, float])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, seen: Seen) -> None:
        """Take in one event."""
        name = seen.body["metadata"]["name"]
        with self._changed:
            if seen.kind == "DELETED":
                self.deleted[name] = seen.at
            else:
                self.added.setdefault(name, seen.at)
                if is_ready(seen.body):
                    self.ready.setdefault(name, seen.at)
            self._changed.notify_all()

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something holds of them."""
        with self._changed:
            assert self._changed.wait_for(holds, timeout_s), (
                f"not within {timeout_s} s: {what}; {len(self.added)} added, {len(self.ready)} ready"
            )


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds from the first object's ADDED event until all pods were there, and until all were Ready."""

    to_pods_s: float
    to_ready_s: float


class Load:
    """One namespace of the cluster, filled and emptied."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.objects = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        self.deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self.pods = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, manifests: list[Body]) -> None:
        """Create objects and Deployments, many at a time."""

        def post(manifest: Body) -> None:
            self.api.call("POST", self.objects if manifest["kind"] == KIND else self.deployments, manifest)

        with ThreadPoolExecutor(_CLIENTS) as pool:
            list(pool.map(post, manifests))

    def time(self, manifests: list[Body], num_pods: int, timeout_s: float = 300.0) -> Took:
        """Create objects or Deployments; return how long their pods took."""
        first: list[float] = []
        pods = Pods()
        owners = self.objects if manifests[0]["kind"] == KIND else self.deployments
        with (
            self.api.watch(owners, lambda seen: first.append(seen.at) if seen.kind == "ADDED" else None),
            self.api.watch(self.pods, pods.take),
        ):
            self.create(manifests)
            pods.wait(f"{num_pods} pods are Ready", lambda: len(pods.ready) >= num_pods, timeout_s)
        return Took(max(pods.added.values()) - first[0], max(pods.ready.values()) - first[0])

    def statuses(self) -> list[Body]:
        """Return the objects."""
        return self.api.items(self.objects)

    def wait_until_serving(self, number: int, timeout_s: float = 120.0) -> None:
        """Wait until so many objects say that they are Ready; one that is refused ends the wait."""
        deadline = time.monotonic() + timeout_s
        while True:
            bodies = self.statuses()
            if sum(map(is_ready, bodies)) >= number:
                return
            said = [one for body in bodies for one in body.get("status", {}).get("conditions", [])]
            not_ready = [one for one in said if one["type"] == "Ready" and one["status"] == "False"]
            refused = [one["message"] for one in not_ready if one["reason"] == "InvalidSpec"]
            assert not refused, refused[0]
            assert time.monotonic() < deadline, (
                f"{len(not_ready)} of {number} objects are not Ready after {timeout_s} s: "
                f"{[one['message'] for one in not_ready][:1]}"
            )
            time.sleep(0.5)

    def empty(self, timeout_s: float = 300.0) -> None:
        """Delete everything and wait until no pod is left."""
        for path in (self.objects, self.deployments):
            self.api.call("DELETE", path, {"propagationPolicy": "Background"})
        deadline = time.monotonic() + timeout_s
        while self.api.items(f"{self.pods}?limit=1") or self.api.items(f"{self.deployments}?limit=1"):
            assert time.monotonic() < deadline, f"pods are left after {timeout_s} s"
            time.sleep(0.2)


def is_ready(body: Body) -> bool:
    """Whether the Ready condition of a pod or an object is True."""
    conditions = body.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@dataclass(frozen=True, slots=True)
class Writes:
    """Write requests of the operator that the API server has answered, events left out, and those that conflicted."""

    count: int
    conflicts: int

    def __sub__(self, other: "Writes") -> "Writes":
        return Writes(self.count - other.count, self.conflicts - other.conflicts)


def operator_writes(api: ApiServer) -> Writes:
    """Return what the operator has written so far, in a cluster where nobody else applies server-side.

    Nobody else scales Deployments by their subresource, or patches pods themselves: kwok patches their status.
    """
    count = conflicts = 0
    for labels, number in api.requests():
        verb, resource, subresource = (labels.get(key, "") for key in ("verb", "resource", "subresource"))
        ours = (
            verb == "APPLY"
            or (verb in ("PUT", "PATCH") and subresource == "scale")
            or (verb == "PATCH" and resource == "pods" and not subresource)
            or (verb == "DELETE" and resource in ("deployments", "services", "secrets", "roles", "rolebindings"))
        )
        if ours and resource != "events":
            count += number
            conflicts += number if labels.get("code") == "409" else 0
    return Writes(count, conflicts)
