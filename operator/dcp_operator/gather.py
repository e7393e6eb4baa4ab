"""The only reader of the cluster: a cache that watch events fill and lists correct, and snapshots of it.

Events of one object can arrive late and a deletion can be missed while a watch is cut, so a body is only replaced by a
newer one, what is gone comes back only with a newer one, and every resync compares the cache with a list.
"""

from collections.abc import Iterable
from typing import Any, Final

from dcp_operator import names
from dcp_operator.groups import as_engines
from dcp_operator.kinds import (
    CHILD_KINDS,
    CONTROLLER_REVISION,
    DEPLOYMENT_OF_ENGINES,
    OPTIONAL_KINDS,
    POD,
    SECRET,
    Kind,
    Ref,
    ref_of,
)
from dcp_operator.observed import Body, Child, Key, Observed, Settled, controller_of, section, stored_key
from dcp_operator.port_ledger import PortLedger

#: Everything that is watched in every cluster.
WATCHED_KINDS = (DEPLOYMENT_OF_ENGINES, *CHILD_KINDS, POD)
_CHILDREN = frozenset(kind.kind for kind in (*CHILD_KINDS, *OPTIONAL_KINDS))
#: Objects that are gone and remembered: late news is seconds old, and this is many times what goes in seconds.
_GONE_KEPT: Final = 10_000


class Cache:
    """What is known of every object and its children. Used from the event loop only."""

    def __init__(self) -> None:
        #: By object, everything that bears its name: itself, its children, its pods.
        self._held: dict[Key, dict[Ref, Body]] = {}
        #: Where the object with a uid is kept: its label can change, and names are used again.
        self._places: dict[str, Key] = {}
        #: By uid, the version up to which news of an object is from before its end; the oldest first.
        self._gone: dict[str, int] = {}
        self._settled: dict[Key, dict[Ref, Settled]] = {}
        self._kv_keys: dict[tuple[Key, str], str] = {}
        self._ports = PortLedger()
        #: By namespace (None: in all), optional kinds that can't be had, and why.
        self._unavailable: dict[str | None, dict[str, str]] = {}

    def keys(self) -> list[Key]:
        """Return all objects that exist."""
        return [key for key, held in self._held.items() if _own_ref(key) in held]

    def knows(self, key: Key) -> bool:
        """Whether an object exists."""
        return _own_ref(key) in self._held.get(key, {})

    def say_unavailable(self, kind: Kind, namespace: str | None, why: str | None) -> bool:
        """Take in that a kind can't be had in a namespace (None: in any), or can; return whether that is news."""
        known = self._unavailable.setdefault(namespace, {})
        if known.get(kind.kind) == why:
            return False
        if why is None:
            del known[kind.kind]
        else:
            known[kind.kind] = why
        return True

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
            pods=as_engines(child for ref, child in held.items() if ref.kind == POD.kind),
            remembered_key=self._kv_keys.get((key, body["metadata"]["uid"])),
            settled=dict(self._settled.get(key, {})),
            ports_of_others=self._ports.taken_from(key),
            unavailable={**self._unavailable.get(None, {}), **self._unavailable.get(key.namespace, {})},
        )

    def lend_ports(self, key: Key, ports: Iterable[int]) -> None:
        """Keep ports of nodes for an object whose workloads are about to be made."""
        self._ports.lend(key, ports)

    def store(self, body: Body) -> set[Key]:
        """Take in an object as it is now; return whose it is, and was if somebody changed its label or its owner.

        Empty where it is of no interest, older than what is known, or the same.
        """
        changed: set[Key] = set()
        uid, ref, key = body["metadata"]["uid"], ref_of(body), owner_key(body)
        if self._is_from_before_its_end(body):
            return changed
        before, kept = self._places.get(uid), slim(body)
        if before is not None:
            known = self._held[before][ref]
            # The answer to a write of ours comes again as an event: nothing in it is news.
            if _is_older(body, known) or kept == known:
                return changed
            if before != key:
                changed |= self.drop(body)
        if key is not None:
            self._gone.pop(uid, None)
            self._displace(key, ref, body)
            self._held.setdefault(key, {})[ref] = kept
            self._places[uid] = key
            self._ports.see(key, body)
            self._remember_kv_key(key, body)
            changed.add(key)
        return changed

    def drop(self, body: Body) -> set[Key]:
        """Take in that an object is gone; return whose it was. Another object under its name is left alone.

        The body's version is that of its end, if the API server told of it. One that was never seen is remembered too,
        and whose it was is told if nothing else has its name: the answer to the write that made it may be on its way.
        """
        self._remember_gone(body, body["metadata"].get("resourceVersion"))
        return self._remove(body)

    def _remove(self, body: Body) -> set[Key]:
        uid, ref = body["metadata"]["uid"], ref_of(body)
        key = self._places.pop(uid, None)
        if key is None:
            owner = owner_key(body)
            return {owner} if owner is not None and ref not in self._held.get(owner, {}) else set()
        held = self._held[key]
        del held[ref]
        self._ports.forget(uid)
        if ref == _own_ref(key):
            self._ports.lend(key, ())
            self._settled.pop(key, None)
            self._kv_keys.pop((key, uid), None)
        if not held:
            del self._held[key]
        return {key}

    def is_behind(self, listed: Iterable[Body]) -> bool:
        """Whether a list shows something newer than what is known, that a watch should have told or is about to."""
        return any(map(self._is_news, listed))

    def _is_news(self, body: Body) -> bool:
        key = self._places.get(body["metadata"]["uid"])
        if key is None:
            return owner_key(body) is not None and not self._is_from_before_its_end(body)
        return _is_older(self._held[key][ref_of(body)], body)

    def correct(self, kind: Kind, listed: Iterable[Body], version: str, namespace: str | None) -> set[Key]:
        """Take in a list of a kind in a namespace (None: in all); return whose objects it changed.

        What is newer than the list's version stays.
        """
        changed: set[Key] = set()
        seen: set[str] = set()
        for body in listed:
            seen.add(body["metadata"]["uid"])
            changed |= self.store(body)
        known = [
            body
            for key, held in self._held.items()
            if namespace in (None, key.namespace)
            for ref, body in held.items()
            if ref.kind == kind.kind
        ]
        for body in known:
            if body["metadata"]["uid"] not in seen and not _is_newer_than(body, version):
                self._remember_gone(body, version)
                changed |= self._remove(body)
        return changed

    def settle(self, key: Key, ref: Ref, record: Settled) -> None:
        """Remember that applying a manifest changes nothing."""
        self._settled.setdefault(key, {})[ref] = record

    def _displace(self, key: Key, ref: Ref, body: Body) -> None:
        """Make room for an object: what had its name before was gone when it was made."""
        present = self._held.get(key, {}).get(ref)
        if present is not None and present["metadata"]["uid"] != body["metadata"]["uid"]:
            self._remember_gone(present, body["metadata"].get("resourceVersion"))
            self._remove(present)

    def _remember_gone(self, body: Body, version: Any) -> None:
        """Remember that whatever is said of an object up to a version is from before its end."""
        uid, number = body["metadata"]["uid"], _version(version)
        if number is None:
            return
        self._gone[uid] = max(number, self._gone.pop(uid, 0))
        while len(self._gone) > _GONE_KEPT:
            del self._gone[next(iter(self._gone))]

    def _is_from_before_its_end(self, body: Body) -> bool:
        version = _version(body["metadata"].get("resourceVersion"))
        end = self._gone.get(body["metadata"]["uid"])
        return version is not None and end is not None and version <= end

    def _remember_kv_key(self, key: Key, body: Body) -> None:
        """Keep the control channel's key, so that a deleted Secret comes back with the key that the engines have."""
        if body["kind"] != SECRET.kind or body["metadata"]["name"] != names.key_secret(key.name):
            return
        stored, owner = stored_key(body), controller_of(body)
        if owner and stored is not None:
            self._kv_keys[key, owner["uid"]] = stored


def _own_ref(key: Key) -> Ref:
    return Ref(DEPLOYMENT_OF_ENGINES.kind, key.name)


def owner_key(body: Body) -> Key | None:
    """Return the object that something belongs to, or that it is: by its controller, else by its label."""
    metadata = body["metadata"]
    if body.get("kind") == DEPLOYMENT_OF_ENGINES.kind:
        return Key(metadata["namespace"], metadata["name"])
    owner = controller_of(body)
    if owner.get("kind") == DEPLOYMENT_OF_ENGINES.kind:
        return Key(metadata["namespace"], owner["name"])
    name = section(body, "metadata", "labels").get(names.LABEL_NAME)
    return Key(metadata["namespace"], name) if name else None


def slim(body: Body) -> Body:
    """Return a body without what no decision reads; pods are many and most of a pod is its spec."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    result = {**body, "metadata": metadata}
    if body["kind"] == CONTROLLER_REVISION.kind:
        result.pop("data", None)
    if body["kind"] == POD.kind:
        status = section(body, "status")
        kept = ("phase", "reason", "message", "conditions", "podIP", "initContainerStatuses", "containerStatuses")
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
