"""What NetworkPolicies allow, read from the policies themselves: Kubernetes' rules for traffic into pods.

A pod that no policy selects takes everything. One that some do takes what a rule of any of them allows. Only what this
project renders is understood; anything else fails, so that no test passes on a rule that was not read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a connection: a pod. `ports` are its named ports; one without a namespace is no pod at all."""

    namespace: str | None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    ports: Mapping[str, int] = field(default_factory=dict[str, int])


def allows(policies: Iterable[Body], source: End, target: End, port: int) -> bool:
    """Whether policies let a connection of `source` to a TCP port of `target` through."""
    selecting = [policy for policy in policies if _selects(policy, target)]
    return not selecting or any(
        _from(rule, policy["metadata"]["namespace"], source) and _to(rule, target, port)
        for policy in selecting
        for rule in policy["spec"]["ingress"]
    )


def _selects(policy: Body, target: End) -> bool:
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    is_here = policy["metadata"]["namespace"] == target.namespace
    return is_here and _matches(policy["spec"]["podSelector"], target.labels)


def _from(rule: Body, namespace: str, source: End) -> bool:
    # Kubernetes reads an empty list as everybody.
    return not rule.get("from") or any(_is_peer(peer, namespace, source) for peer in rule["from"])


def _is_peer(peer: Body, namespace: str, source: End) -> bool:
    assert peer
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    if source.namespace is None:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        in_namespace = source.namespace == namespace
    return in_namespace and _matches(peer.get("podSelector", {}), source.labels)


def _to(rule: Body, target: End, port: int) -> bool:
    wanted = [target.ports.get(each["port"]) for each in rule.get("ports", []) if each["protocol"] == "TCP"]
    return not rule.get("ports") or port in wanted


def _matches(selector: Body, labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )
