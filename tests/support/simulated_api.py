"""An API server in memory with just enough of Kubernetes behind it: apply, versions, garbage collection, Deployments.

It stands in for the cluster where thousands of steps are tried; what it says about server-side apply is checked against
the real one by tests/cluster/test_operator.py.
"""

import copy
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from dcp_operator import names
from dcp_operator.client import ApiError
from dcp_operator.gather import WATCHED_KINDS, Cache
from dcp_operator.kinds import CHILD_KINDS, DEPLOYMENT, DEPLOYMENT_OF_ENGINES, POD, ROLE, ROLE_BINDING, Kind, kind_named
from dcp_operator.observed import Key, Observed

#: When the server was started; its clock goes on by a second with every write.
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)

Body = dict[str, Any]
Place = tuple[str, str, str]


class SimulatedApi:
    """Objects by (kind, namespace, name). `writes` are the calls that a real server would count as writes."""

    def __init__(self) -> None:
        self.objects: dict[Place, Body] = {}
        self.applied: dict[Place, Body] = {}
        #: What was applied to statuses last.
        self.stated: dict[Place, Body] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.refuse: dict[tuple[str, str], ApiError] = {}
        self.events: list[Body] = []
        #: Optional kinds that this server knows.
        self.served: set[str] = set()
        self._versions = itertools.count(1)

    # What the operator calls.

    def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    def list(self, kind: Kind, namespace: str | None, label_selector: str = "") -> tuple[list[Body], str]:
        found = [
            copy.deepcopy(body)
            for (one, where, _), body in self.objects.items()
            if one == kind.kind
            and namespace in (None, where)
            and (not label_selector or label_selector in body["metadata"].get("labels", {}))
        ]
        return found, str(next(self._versions))

    def apply(self, kind: Kind, namespace: str, manifest: Body, subresource: str | None = None) -> Body:
        place = (kind.kind, namespace, manifest["metadata"]["name"])
        self._maybe_refuse("apply", kind)
        if kind is ROLE_BINDING and (ROLE.kind, namespace, manifest["roleRef"]["name"]) not in self.objects:
            # Who may not give away every right has the Role read, to see that it holds no more than their own.
            raise ApiError(404, "NotFound", f"role {manifest['roleRef']['name']} not found")
        self.writes.append(("apply", kind.kind if subresource is None else subresource, place[2]))
        before = self.objects.get(place)
        wanted_uid = manifest["metadata"].get("uid")
        if wanted_uid is not None and (before is None or before["metadata"]["uid"] != wanted_uid):
            raise ApiError(409, "Conflict", "the uid is another")
        if subresource == "status":
            assert before is not None
            there: Body = before.get("status", {})
            status = _overlay(_without(there, self.stated.get(place, {})), copy.deepcopy(manifest["status"]))
            self.stated[place] = copy.deepcopy(manifest["status"])
            if "conditions" in status:
                # A list by type: conditions of other field managers stay.
                ours = {entry["type"] for entry in status["conditions"]}
                status["conditions"] += [each for each in there.get("conditions", []) if each["type"] not in ours]
            return self._store(place, {**before, "status": status}, is_spec=False)
        base: Body = _without(before, self.applied.get(place, {})) if before is not None else {}
        body = _overlay(base, copy.deepcopy(manifest))
        self.applied[place] = copy.deepcopy(manifest)
        return self._store(place, body, is_spec=before is None or before.get("spec") != body.get("spec"))

    def make(self, kind: Kind, namespace: str, manifest: Body) -> Body:
        name = manifest["metadata"]["name"]
        self._maybe_refuse("apply", kind)
        if (kind.kind, namespace, name) in self.objects:
            self.writes.append(("make", kind.kind, name))
            raise ApiError(409, "Conflict", "the object has been modified")
        return self.apply(kind, namespace, manifest)

    def create(self, kind: Kind, namespace: str, manifest: Body) -> Body:
        place = (kind.kind, namespace, manifest["metadata"]["name"])
        self._maybe_refuse("apply", kind)
        self.writes.append(("create", kind.kind, place[2]))
        if place in self.objects:
            raise ApiError(409, "AlreadyExists", f"{place[2]} already exists")
        return self._store(place, copy.deepcopy(manifest), is_spec=True)

    def scale(self, kind: Kind, namespace: str, name: str, uid: str, replicas: int) -> str | None:
        self._maybe_refuse("scale", kind)
        self.writes.append(("scale", kind.kind, name))
        place = (kind.kind, namespace, name)
        body = self.objects.get(place)
        if body is None or body["metadata"]["uid"] != uid:
            return None
        changed = {**copy.deepcopy(body), "spec": {**copy.deepcopy(body["spec"]), "replicas": replicas}}
        stored = self._store(place, changed, is_spec=changed["spec"] != body["spec"])
        return stored["metadata"]["resourceVersion"]

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._maybe_refuse("delete", kind)
        self.writes.append(("delete", kind.kind, name))
        body = self.objects.get((kind.kind, namespace, name))
        if body is not None and body["metadata"]["uid"] == uid:
            self.remove(kind.kind, namespace, name)

    def delete_with_dependents(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self.delete(kind, namespace, name, uid)

    def annotate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> Body:
        self._maybe_refuse("annotate", kind)
        self.writes.append(("annotate", kind.kind, name))
        place = (kind.kind, namespace, name)
        before = self.objects.get(place)
        if before is None or before["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the uid is another")
        metadata = before["metadata"]
        merged = {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}
        return self._store(place, {**copy.deepcopy(before), "metadata": copy.deepcopy(merged)}, is_spec=False)

    def serves(self, kind: Kind) -> bool:
        return kind.kind in self.served

    def watch(self, kind: Kind, namespace: str | None, label_selector: str, version: str) -> Iterator[tuple[str, Body]]:
        """Nothing happens that is told: tests tell the operator themselves."""
        return iter(())

    def drop_from_status(self, kind: Kind, namespace: str, name: str, uid: str, fields: Body) -> Body:
        self.writes.append(("drop", "status", name))
        place = (kind.kind, namespace, name)
        before = self.objects.get(place)
        if before is None:
            raise ApiError(404, "NotFound", f"{name} not found")
        if before["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the uid is another")
        return self._store(place, {**before, "status": _dropped(before["status"], fields)}, is_spec=False)

    def create_event(self, namespace: str, event: Body) -> Body:
        name = f"{event['metadata']['generateName']}{len(self.events)}"
        stored = {**event, "metadata": {**event["metadata"], "name": name}}
        self.events.append(stored)
        return copy.deepcopy(stored)

    def repeat_event(self, namespace: str, name: str, count: int, now: str) -> None:
        event = next((event for event in self.events if event["metadata"]["name"] == name), None)
        if event is None:
            raise ApiError(404, "NotFound", "the event has expired")
        event |= {"count": count, "lastTimestamp": now}

    # What users and other controllers do.

    def put(self, body: Body) -> Body:
        """Create or replace an object, as a user does with kubectl replace."""
        place = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        before = self.objects.get(place)
        return self._store(place, copy.deepcopy(body), is_spec=before is None or before.get("spec") != body.get("spec"))

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object and, by their owner references, what it owns."""
        gone = self.objects.pop((kind, namespace, name), None)
        self.applied.pop((kind, namespace, name), None)
        if gone is None:
            return
        for place, body in list(self.objects.items()):
            owners = body["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self.remove(*place)

    def run_deployments(self, *, broken: frozenset[str] = frozenset()) -> None:
        """Do what Kubernetes does with Deployments: make pods and report. Pods of `broken` revisions never get ready.

        A router is ready only when both roles of its revision have a ready pod.
        """
        deployments = [body for place, body in self.objects.items() if place[0] == DEPLOYMENT.kind]
        deployments.sort(key=lambda body: "-router-" in body["metadata"]["name"])
        for deployment in deployments:
            self._run(deployment, broken)

    def _run(self, deployment: Body, broken: frozenset[str]) -> None:
        metadata, spec = deployment["metadata"], deployment["spec"]
        labels = spec["template"]["metadata"]["labels"]
        revision, role = labels[names.LABEL_REVISION], labels[names.LABEL_ROLE]
        is_ready = revision not in broken
        if role == names.ROUTER:
            is_ready = is_ready and all(
                self._ready_pods(metadata, labels[names.LABEL_NAME], revision, engine)
                for engine in ("prefill", "decode")
            )
        for number in range(max(spec["replicas"], self._pods_of(metadata))):
            name = f"{metadata['name']}-{number}"
            if number >= spec["replicas"]:
                self.remove(POD.kind, metadata["namespace"], name)
                continue
            pod = {
                "kind": POD.kind,
                "metadata": {
                    "name": name,
                    "namespace": metadata["namespace"],
                    "labels": labels,
                    "annotations": spec["template"]["metadata"].get("annotations", {}),
                    "ownerReferences": [{"uid": metadata["uid"]}],
                },
                "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(is_ready)}]},
            }
            self._store((POD.kind, metadata["namespace"], name), pod, is_spec=False)
        deployment["status"] = {
            "observedGeneration": metadata["generation"],
            "replicas": spec["replicas"],
            "updatedReplicas": spec["replicas"],
            "readyReplicas": spec["replicas"] if is_ready else 0,
        }
        metadata["resourceVersion"] = str(next(self._versions))

    def _pods_of(self, metadata: Body) -> int:
        return sum(
            any(owner["uid"] == metadata["uid"] for owner in body["metadata"].get("ownerReferences", []))
            for place, body in self.objects.items()
            if place[0] == POD.kind
        )

    def _ready_pods(self, metadata: Body, owner: str, revision: str, role: str) -> int:
        return sum(
            body["metadata"]["labels"].get(names.LABEL_REVISION) == revision
            and body["metadata"]["labels"].get(names.LABEL_ROLE) == role
            and body["metadata"]["labels"].get(names.LABEL_NAME) == owner
            and body["status"]["conditions"][0]["status"] == "True"
            for place, body in self.objects.items()
            if place[0] == POD.kind and place[1] == metadata["namespace"]
        )

    def _store(self, place: Place, body: Body, *, is_spec: bool) -> Body:
        before = self.objects.get(place)
        body["kind"] = place[0]
        body["apiVersion"] = kind_named(place[0]).api_version
        if before is not None and _same(before, body):
            return copy.deepcopy(before)
        version = next(self._versions)
        old = before["metadata"] if before is not None else {}
        body["metadata"] = {
            **body["metadata"],
            "uid": old.get("uid", f"uid-{version}"),
            "creationTimestamp": old.get(
                "creationTimestamp", f"{_EPOCH + timedelta(seconds=version):%Y-%m-%dT%H:%M:%SZ}"
            ),
            "generation": old.get("generation", 0) + (1 if is_spec else 0),
            "resourceVersion": str(version),
        }
        self.objects[place] = body
        return copy.deepcopy(body)

    def _maybe_refuse(self, verb: str, kind: Kind) -> None:
        error = self.refuse.get((verb, kind.kind))
        if error is not None:
            raise error

    def children(self) -> dict[tuple[str, str], Body]:
        """Return what the operator made, by kind and name."""
        kinds = {kind.kind for kind in CHILD_KINDS}
        return {(kind, name): body for (kind, _, name), body in self.objects.items() if kind in kinds}

    def owner(self, name: str = "chat") -> Body:
        """Return the object itself."""
        return next(
            body for place, body in self.objects.items() if place[0] == DEPLOYMENT_OF_ENGINES.kind and place[2] == name
        )


def _same(before: Body, body: Body) -> bool:
    ignored = ("uid", "creationTimestamp", "generation", "resourceVersion")
    one = {**before, "metadata": {k: v for k, v in before["metadata"].items() if k not in ignored}}
    other = {**body, "metadata": {k: v for k, v in body["metadata"].items() if k not in ignored}}
    return one == other


def _overlay(base: Body, over: Body) -> Body:
    """Lay one object over another; lists are replaced, which is enough for a server that adds no elements."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _overlay(result[key], value) if both else value
    return result


def _dropped(live: Body, fields: Body) -> Body:
    """Take out of a mapping what is None in another, as a merge patch does."""
    kept = {key: value for key, value in live.items() if key not in fields or fields[key] is not None}
    return {key: _dropped(value, fields[key]) if fields.get(key) else value for key, value in kept.items()}


def _without(live: Body, applied: Body) -> Body:
    """Take out of a live object the fields that were applied before: what server-side apply drops with its owner."""
    result = copy.deepcopy(live)
    for key, value in applied.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _without(result[key], value)
        elif key in result and key not in ("apiVersion", "kind", "name", "namespace"):
            del result[key]
    return result


def observe(api: SimulatedApi, name: str = "chat", namespace: str = "models", cache: Cache | None = None) -> Observed:
    """Return the snapshot that the operator would have after its watches have delivered everything."""
    cache = cache if cache is not None else Cache()
    for kind in WATCHED_KINDS:
        cache.correct(kind, *api.list(kind, None, "" if kind is DEPLOYMENT_OF_ENGINES else names.LABEL_NAME), None)
    observed = cache.snapshot(Key(namespace, name))
    assert observed is not None
    return observed
