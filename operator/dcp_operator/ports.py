"""The ports that engines listen on: the usual ones, or a block of a node's own ports for a role on the host's network.

On a pod's own network every engine has the same ports. On the host's network all pods of a node share one set of them,
so each revision of each object gets a block out of a fixed range. What is taken is read from the workloads
themselves: their container ports are the record, and nothing else remembers it.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.connectors import API_PORT, PROFILES
from dcp_operator.observed import Body, Observed, entries, section
from dcp_operator.settings import Role, resolve_role, role_spec

#: The blocks' range: below Kubernetes' node ports (30000-32767) and Linux' ports for outgoing connections (32768 on),
#: above those from which Mooncake draws the ports of its transfers (15000-17000).
FIRST_HOST_PORT: Final = 20000
LAST_HOST_PORT: Final = 29999
#: Where the pods of a multi-node engine meet, vLLM's own default (--master-port).
GROUP_PORT: Final = 29501

#: Ports at the beginning of a block: HTTP, and where the pods of each role's engines meet.
_COMMON: Final = 1 + len(Role)


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The ports of one role's engines.

    `api` is that of the HTTP server, the same on both roles: a router looks for all engines on one port. `side` is the
    connector's first one, data-parallel rank i of a pod listens i further on. `group` is where the pods of a multi-node
    engine meet.
    """

    api: int
    side: int
    group: int


def on_host_network(spec: Spec) -> bool:
    """Whether a role of the object is on the host's network, so that its ports are allocated."""
    return any(role_spec(spec, role).host_network for role in Role)


def engine_ports(spec: Spec, role: Role, first: int | None = None) -> EnginePorts:
    """Return the ports of one role. `first` is the first port of the revision's block; None stands for any block.

    A block holds: HTTP, prefill's group, decode's group, prefill's side ports, decode's side ports.
    """
    if not on_host_network(spec):
        return EnginePorts(API_PORT, PROFILES[spec.kv_connector.type].side_port, GROUP_PORT)
    start = FIRST_HOST_PORT if first is None else first
    group = start + 1 + list(Role).index(role)
    side = start + _COMMON + (0 if role is Role.PREFILL else _side_width(spec, Role.PREFILL))
    return EnginePorts(start, side, group)


def side_count(spec: Spec, role: Role) -> int:
    """Return on how many ports a pod of a role takes what concerns transfers; 0 where it doesn't listen."""
    profile = PROFILES[spec.kv_connector.type]
    if role not in profile.side_port_roles:
        return 0
    return resolve_role(spec, role).data_local if profile.side_port_per_rank else 1


def _side_width(spec: Spec, role: Role) -> int:
    """Return how many side ports a block has for a role: one where it doesn't listen, as its connector reads one."""
    return max(1, side_count(spec, role))


def block_size(spec: Spec) -> int:
    """Return how many ports a revision of this spec needs on a node."""
    return _COMMON + sum(_side_width(spec, role) for role in Role)


def find_block(identity: str, size: int, taken: Collection[int]) -> int | None:
    """Return the first of `size` successive ports of the range none of which is taken, or None if there are none.

    The search begins at a place that a hash of `identity` names: the same for the same revision, another for most
    others, so that few searches meet although none waits for another.
    """
    places = LAST_HOST_PORT - FIRST_HOST_PORT + 2 - size
    used = frozenset(taken)
    begin = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    starts = (FIRST_HOST_PORT + (begin + step) % places for step in range(places))
    return next((start for start in starts if used.isdisjoint(range(start, start + size))), None)


def assigned_ports(observed: Observed, spec: Spec, revision: str) -> range | None:
    """Return the block of a revision: the one that its workloads have, else a free one; None where none is free.

    Empty while no role is on the host's network. An earlier revision's block is taken, so that engines of both fit on
    one node.
    """
    if not on_host_network(spec):
        return range(0)
    size = block_size(spec)
    for role in Role:
        workload = observed.workload(role, revision)
        first = api_port_of(workload.body) if workload is not None else None
        if first is not None and FIRST_HOST_PORT <= first <= LAST_HOST_PORT:
            return range(first, first + size)
    own = (host_ports_of(workload.body) for workload in observed.workloads())
    begin = find_block(f"{observed.key}/{revision}", size, observed.ports_of_others.union(*own))
    return None if begin is None else range(begin, begin + size)


def host_ports_of(workload: Body) -> frozenset[int]:
    """Return the ports of a node that the pods of a workload take: those that its pod templates declare as such."""
    found: set[int] = set()
    for template in _pod_templates(workload):
        for container in (*entries(template, "spec", "containers"), *entries(template, "spec", "initContainers")):
            found.update(port["hostPort"] for port in entries(container, "ports") if port.get("hostPort"))
    return frozenset(found)


def api_port_of(workload: Body) -> int | None:
    """Return the HTTP port of a workload's engines, None if it has none. On the host's network it begins the block."""
    for template in _pod_templates(workload):
        for container in entries(template, "spec", "containers"):
            for port in entries(container, "ports"):
                if container.get("name") == names.CONTAINER_MAIN and port.get("name") == names.PORT_NAME_HTTP:
                    return port["containerPort"]
    return None


def _pod_templates(workload: Body) -> list[Body]:
    """Return the pod templates of a Deployment, or of a LeaderWorkerSet's leader and workers."""
    spec, group = section(workload, "spec"), section(workload, "spec", "leaderWorkerTemplate")
    candidates = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [candidate for candidate in candidates if candidate]
