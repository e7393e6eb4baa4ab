"""Where engines are placed with regard to one another: a topology constraint as pod affinity."""

from typing import Any, cast

from dcp_operator import names
from dcp_operator.api.spec import TopologyConstraint
from dcp_operator.build.merge import Manifest, TemplateError, part
from dcp_operator.settings import Role

#: Of 1 to 100: a preference of ours counts as much as the strongest of the user's.
_WEIGHT = 100


def with_topology(
    pod: Manifest, constraint: TopologyConstraint | None, name: str, revision: str, path: str
) -> Manifest:
    """Return a pod's spec that keeps the engines of a revision in one domain, beside the affinity that it has.

    Required terms hold all together and preferred ones add up, so that ours only joins the user's. Raises
    TemplateError where the template's affinity is no map of lists.
    """
    if constraint is None:
        return pod
    affinity = part(pod, "affinity", path)
    near = part(affinity, "podAffinity", f"{path}.affinity")
    term = _term(constraint, name, revision)
    if constraint.enforcement == "Required":
        key, entry = "requiredDuringSchedulingIgnoredDuringExecution", term
    else:
        key, entry = "preferredDuringSchedulingIgnoredDuringExecution", {"weight": _WEIGHT, "podAffinityTerm": term}
    stated: object = near.get(key) or []
    if not isinstance(stated, list):
        raise TemplateError(f"{path}.affinity.podAffinity.{key}: expected a list, found {stated!r}")
    terms = [*cast("list[Any]", stated), entry]
    return {**pod, "affinity": {**affinity, "podAffinity": {**near, key: terms}}}


def _term(constraint: TopologyConstraint, name: str, revision: str) -> Manifest:
    """Return the term: engines of both roles, never the routers. A pod that comes first satisfies it by itself."""
    labels = {names.LABEL_NAME: name, **({names.LABEL_REVISION: revision} if revision else {})}
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": [role.value for role in Role]}
    return {
        "labelSelector": {"matchLabels": labels, "matchExpressions": [roles]},
        "topologyKey": constraint.topology_key,
    }
