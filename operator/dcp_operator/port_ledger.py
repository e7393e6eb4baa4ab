"""Which ports of nodes are taken by which object: read off the workloads that the cache holds, and lent until seen.

Two objects can be looked at before the workloads of the first are in the cache, so what a pass has chosen counts as
taken from then on. A restart forgets that and loses nothing: what was written is read again.
"""

from collections.abc import Iterable

from dcp_operator.observed import Body, Key
from dcp_operator.ports import host_ports_of


class PortLedger:
    """Ports by object. Used from the event loop only."""

    def __init__(self) -> None:
        #: By the uid of a workload: whose it is, and its ports. Most objects use no ports of nodes and aren't here.
        self._seen: dict[str, tuple[Key, frozenset[int]]] = {}
        self._lent: dict[Key, frozenset[int]] = {}

    def see(self, key: Key, body: Body) -> None:
        """Take in a workload of an object as it is now."""
        uid, ports = body["metadata"]["uid"], host_ports_of(body)
        if ports:
            self._seen[uid] = (key, ports)
        else:
            self._seen.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Take in that a workload is gone."""
        self._seen.pop(uid, None)

    def lend(self, key: Key, ports: Iterable[int]) -> None:
        """Keep ports for an object, instead of those that were kept for it before."""
        kept = frozenset(ports)
        if kept:
            self._lent[key] = kept
        else:
            self._lent.pop(key, None)

    def taken_from(self, key: Key) -> frozenset[int]:
        """Return the ports that other objects have or are about to have."""
        seen = (ports for owner, ports in self._seen.values() if owner != key)
        lent = (ports for owner, ports in self._lent.items() if owner != key)
        return frozenset[int]().union(*seen, *lent)
