"""Rules on whose network engines are on, and in which domain of the cluster they run."""

import pytest

from tests.support.specimens import report, role, violations


def near(key: str, enforcement: str = "Preferred") -> dict:
    return {"spec": {"topologyConstraint": {"topologyKey": key, "enforcement": enforcement}}}


def affinity(value) -> dict:
    return role("decode", template={"spec": {"affinity": value}})


TEMPLATE = "spec.decode.template.spec"
KEY = "spec.topologyConstraint.topologyKey"

REFUSED = {
    "the host's network by the template alone": (
        [role("decode", template={"spec": {"hostNetwork": True}})],
        (
            f"{TEMPLATE}.hostNetwork: true without spec.decode.hostNetwork, so every engine of the cluster would ask "
            "its node for the same ports; nearest that works: true in spec.decode.hostNetwork [host-ports]"
        ),
    ),
    "the host's network, yes and no": (
        [role("decode", hostNetwork=True, template={"spec": {"hostNetwork": False}})],
        (
            f"{TEMPLATE}.hostNetwork: false contradicts spec.decode.hostNetwork true; remove one of the two; nearest "
            "that "
            "works: false in spec.decode.hostNetwork [host-ports]"
        ),
    ),
    "a label with its value": (
        [near("rack=a")],
        (
            f'{KEY}: "rack=a" can\'t be the key of a label; write it as kubectl get nodes --show-labels does '
            "[topology-key]"
        ),
    ),
    "one node for all, on its network": (
        [role("prefill", hostNetwork=True), near("kubernetes.io/hostname", "Required")],
        (
            f'{KEY}: "kubernetes.io/hostname" with enforcement Required keeps all engines of a revision on one node, '
            "and "
            "with spec.prefill.hostNetwork true a node takes one of them; nearest that work: Preferred in "
            "spec.topologyConstraint.enforcement, or false in spec.prefill.hostNetwork [topology-key]"
        ),
    ),
    "an affinity that is no map": (
        [near("rack"), affinity({"podAffinity": []})],
        (
            f"{TEMPLATE}.affinity.podAffinity: found [], must be a map, which spec.topologyConstraint is joined to "
            "[topology-key]"
        ),
    ),
    "terms that are no list": (
        [near("rack"), affinity({"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": {"a": 1}}})],
        (
            f"{TEMPLATE}.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution: found "
            '{"a": 1}, must be a list, which spec.topologyConstraint is joined to [topology-key]'
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert violations(*changes) == [message]


@pytest.mark.parametrize(
    "key", ["", "/rack", "a/b/c", "-rack", "rack-", "a" * 64, f"{'a' * 254}/b", "A_b/rack", "ra ck"]
)
def test_a_key_that_no_label_can_have_is_refused(key: str):
    assert {finding.rule for finding in report(near(key)).violations} <= {"topology-key", "schema"}
    assert report(near(key)).violations


ALLOWED = {
    "roles on the host's network": [role("prefill", hostNetwork=True), role("decode", hostNetwork=True)],
    "the same said twice": [role("decode", hostNetwork=True, template={"spec": {"hostNetwork": True}})],
    "the pod's own network, in words": [role("decode", template={"spec": {"hostNetwork": False}})],
    "a zone": [near("topology.kubernetes.io/zone", "Required")],
    "a label without a prefix": [near("Rack_1.a")],
    "one node for all, on networks of their own": [near("kubernetes.io/hostname", "Required")],
    "an affinity of one's own": [near("rack"), affinity({"nodeAffinity": {}, "podAffinity": None})],
    "no constraint and an odd affinity": [affinity({"podAffinity": "odd"})],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(changes):
    verdict = report(*changes)
    assert (verdict.violations, verdict.warnings) == ((), ())
