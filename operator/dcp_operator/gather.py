"""The only reader of the cluster: a cache that watch events fill and lists correct, and snapshots of it.

Events of one object can arrive late and a deletion can be missed while a watch is cut, so a body is only replaced by a
newer one, and every resync compares the cache with a list.
"""

from collections.abc import Iterable
from typing import Any

from dcp_operator import names
from dcp_operator.kinds import CHILD_KINDS, DEPLOYMENT_OF_ENGINES, POD, SECRET, Kind, Ref, ref_of
from dcp_operator.observed import Body, Child, Key, Observed, Settled, entries, section, stored_key

#: Everything that is watched.
WATCHED_KINDS = (DEPLOYMENT_OF_ENGINES, *CHILD_KINDS, POD)
_CHILDREN = frozenset(kind.kind for kind in CHILD_KINDS)


class Cache:
    """What is known of every object and its children. Used from the event loop only."""

    def __init__(self) -> None:
        #: By object, everything that bears its name: itself, its children, its pods.
        self._held: dict[Key, dict[Ref, Body]] = {}
        self._settled: dict[Key, dict[Ref, Settled]] = {}
        self._kv_keys: dict[tuple[Key, str], str] = {}

    def keys(self) -> list[Key]:
        """Return all objects that exist."""
        return [key for key, held in self._held.items() if _own_ref(key) in held]

    def snapshot(self, key: Key) -> Observed | None:
        """Return what is known about one object, None if it does not exist."""
        held = self._held.get(key, {})
        body = held.get(_own_ref(key))
        if body is None:
            return None
        children = {ref: Child(child) for ref, child in held.items() if ref.kind in _CHILDREN}
        return Observed(
            body=body,
            children=children,
            pods=tuple(child for ref, child in held.items() if ref.kind == POD.kind),
            remembered_key=self._kv_keys.get((key, body["metadata"]["uid"])),
            settled=dict(self._settled.get(key, {})),
        )

    def store(self, body: Body) -> Key | None:
        """Take in an object as it is now; return whose it is, None if it is of no interest or already older."""
        key = owner_key(body)
        if key is None:
            return None
        held = self._held.setdefault(key, {})
        before = held.get(ref_of(body))
        if before is not None and before["metadata"]["uid"] == body["metadata"]["uid"] and _is_older(body, before):
            return None
        held[ref_of(body)] = slim(body)
        self._remember_kv_key(key, body)
        return key

    def drop(self, body: Body) -> Key | None:
        """Take in that an object is gone; return whose it was, None if it is unknown."""
        key = owner_key(body)
        held = self._held.get(key, {}) if key is not None else {}
        before = held.get(ref_of(body))
        if key is None or before is None or before["metadata"]["uid"] != body["metadata"]["uid"]:
            return None
        del held[ref_of(body)]
        if body["kind"] == DEPLOYMENT_OF_ENGINES.kind:
            self._settled.pop(key, None)
            self._kv_keys.pop((key, body["metadata"]["uid"]), None)
        if not held:
            del self._held[key]
        return key

    def correct(self, kind: Kind, listed: Iterable[Body], version: str, namespace: str | None) -> set[Key]:
        """Take in a list of a kind in a namespace (None: in all); return whose objects it changed.

        What is newer than the list's version stays.
        """
        changed: set[Key] = set()
        seen: set[str] = set()
        for body in listed:
            seen.add(body["metadata"]["uid"])
            key = self.store(body)
            if key is not None:
                changed.add(key)
        known = [
            body
            for key, held in self._held.items()
            if namespace in (None, key.namespace)
            for ref, body in held.items()
            if ref.kind == kind.kind
        ]
        for body in known:
            gone = body["metadata"]["uid"] not in seen and not _is_newer_than(body, version)
            if gone and (key := self.drop(body)) is not None:
                changed.add(key)
        return changed

    def settle(self, key: Key, ref: Ref, record: Settled) -> None:
        """Remember that applying a manifest changes nothing."""
        self._settled.setdefault(key, {})[ref] = record

    def _remember_kv_key(self, key: Key, body: Body) -> None:
        """Keep the control channel's key, so that a deleted Secret comes back with the key that the engines have."""
        if body["kind"] != SECRET.kind or body["metadata"]["name"] != names.key_secret(key.name):
            return
        stored = stored_key(body)
        for reference in entries(body, "metadata", "ownerReferences"):
            if reference.get("controller") and stored is not None:
                self._kv_keys[key, reference["uid"]] = stored


def _own_ref(key: Key) -> Ref:
    return Ref(DEPLOYMENT_OF_ENGINES.kind, key.name)


def owner_key(body: Body) -> Key | None:
    """Return the object that something belongs to by its label, or that it is."""
    metadata = body["metadata"]
    if body.get("kind") == DEPLOYMENT_OF_ENGINES.kind:
        return Key(metadata["namespace"], metadata["name"])
    name = section(body, "metadata", "labels").get(names.LABEL_NAME)
    return Key(metadata["namespace"], name) if name else None


def slim(body: Body) -> Body:
    """Return a body without what no decision reads; pods are many and most of a pod is its spec."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    result = {**body, "metadata": metadata}
    if body["kind"] == POD.kind:
        status = section(body, "status")
        kept = ("phase", "reason", "message", "conditions", "initContainerStatuses", "containerStatuses")
        result = {
            "kind": body["kind"],
            "metadata": metadata,
            "status": {key: status[key] for key in kept if key in status},
        }
    return result


def _version(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() else None


def _is_older(body: Body, known: Body) -> bool:
    """Whether a body is strictly older than what is known; resource versions are numbers that rise."""
    version = _version(body["metadata"].get("resourceVersion"))
    present = _version(known["metadata"].get("resourceVersion"))
    return version is not None and present is not None and version < present


def _is_newer_than(body: Body, version: str) -> bool:
    own, listed = _version(body["metadata"].get("resourceVersion")), _version(version)
    return own is not None and listed is not None and own > listed
