"""Rules on where engines run: on whose network, and in which domain of the cluster."""

import re
from collections.abc import Iterator
from typing import Final

from dcp_operator.api.findings import show
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.pod_template import as_map

_LABEL_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LONGEST_PREFIX: Final = 253
_LONGEST_NAME: Final = 63
_HOSTNAME: Final = "kubernetes.io/hostname"


def host_ports(context: Context) -> Iterator[Problem]:
    """hostNetwork is stated by the role's field, so that its ports are the operator's choice.

    All pods of a node share the ports of its network. With the field the operator gives each object and revision
    ports of their own, tells them to the engine, the connector, the router and the probes, and the scheduler keeps
    apart what would meet. With the template alone, all engines of the cluster would ask for the same ports.

    Set spec.prefill.hostNetwork or spec.decode.hostNetwork, and leave it out of the template.
    """
    for role in context.roles:
        stated = role.template.spec.get("hostNetwork")
        path, field = f"{role.template.path}.spec.hostNetwork", f"{role.path}.hostNetwork"
        if stated is True and not role.stated.host_network:
            yield Problem(
                path,
                f"true without {field}, so every engine of the cluster would ask its node for the same ports",
                fixes=(Fix(field, value=True), Fix(path, REMOVED)),
            )
        if stated is False and role.stated.host_network:
            yield Problem(
                path,
                f"false contradicts {field} true; remove one of the two",
                fixes=(Fix(path, REMOVED), Fix(field, value=False)),
            )


def topology_key(context: Context) -> Iterator[Problem]:
    """topologyConstraint names a label that nodes can have, and a domain in which the engines can all be.

    The scheduler compares the value of this label of nodes. A key that can't be a label's is refused by the API server
    when the pods are made. Kept on one node (kubernetes.io/hostname, Required), engines on that node's network
    would have to share its ports, which they can't.

    Write the label as `kubectl get nodes --show-labels` shows it, without its value.
    """
    constraint = context.spec.topology_constraint
    if constraint is None:
        return
    key, path = constraint.topology_key, "spec.topologyConstraint.topologyKey"
    prefix, slash, name = key.rpartition("/")
    has_prefix = not slash or (len(prefix) <= _LONGEST_PREFIX and _LABEL_PREFIX.fullmatch(prefix) is not None)
    if not has_prefix or len(name) > _LONGEST_NAME or not _LABEL_NAME.fullmatch(name):
        yield Problem(
            path, f"{show(key)} can't be the key of a label; write it as kubectl get nodes --show-labels does"
        )
    on_host = next((role for role in context.roles if role.stated.host_network), None)
    if key == _HOSTNAME and constraint.enforcement == "Required" and on_host is not None:
        yield Problem(
            path,
            f"{show(key)} with enforcement Required keeps all engines of a revision on one node, and with "
            f"{on_host.path}.hostNetwork true a node takes one of them",
            fixes=(
                Fix("spec.topologyConstraint.enforcement", "Preferred"),
                Fix(f"{on_host.path}.hostNetwork", value=False),
            ),
        )
    for role in context.roles:
        yield from _joinable(role)


def _joinable(role: RoleContext) -> Iterator[Problem]:
    """Check that a template's affinity can be joined by the operator's."""
    path = f"{role.template.path}.spec"
    joined = "which spec.topologyConstraint is joined to"
    affinity = role.template.spec.get("affinity")
    near = as_map(affinity).get("podAffinity")
    for where, value in ((f"{path}.affinity", affinity), (f"{path}.affinity.podAffinity", near)):
        if value is not None and not isinstance(value, dict):
            yield Problem(where, f"found {show(value)}, must be a map, {joined}")
    for kind in ("required", "preferred"):
        field = f"{kind}DuringSchedulingIgnoredDuringExecution"
        terms = as_map(near).get(field)
        if terms is not None and not isinstance(terms, list):
            yield Problem(f"{path}.affinity.podAffinity.{field}", f"found {show(terms)}, must be a list, {joined}")


RULES = (
    Rule("host-ports", host_ports, sources=("vllm-ascend #10653",)),
    Rule("topology-key", topology_key),
)
