"""Rules on engines of several nodes, against every number of nodes and ranks."""

import pytest

from tests.support.specimens import MLA, main_container, report, role, sizes, violations

NODES = {"nodeCount": 2}


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_a_number_of_nodes_is_refused_exactly_when_it_does_not_divide_the_ranks(tensor: int, pipeline: int):
    for nodes in range(2, 12):
        changes = [MLA, sizes("decode", tensor=tensor, pipeline=pipeline, decodeContext=tensor)]
        found = report(*changes, role("decode", multinode={"nodeCount": nodes})).violations
        rules = {finding.rule for finding in found}
        assert rules == ({"multinode-ranks"} if tensor * pipeline % nodes else set()), nodes


REFUSED = {
    "ranks that don't divide": (
        [role("decode", multinode={"nodeCount": 3})],
        (
            "spec.decode.multinode.nodeCount: 3 does not divide the ranks of an engine, "
            "spec.decode.parallelism.tensor 8 "
            "x prefillContext 1 x pipeline 1; nearest that work: 2, 4 [multinode-ranks]"
        ),
    ),
    "one rank": (
        [role("prefill", parallelism={"tensor": 1}, multinode=NODES)],
        (
            "spec.prefill.multinode.nodeCount: 2 does not divide the ranks of an engine, "
            "spec.prefill.parallelism.tensor 1 "
            "x prefillContext 1 x pipeline 1 [multinode-ranks]"
        ),
    ),
    "data parallelism": (
        [sizes("decode", data=2), role("decode", multinode=NODES)],
        (
            "spec.decode.parallelism.data: 2 together with spec.decode.multinode.nodeCount 2: an engine on several "
            "nodes "
            "has no data parallelism. Raise replicas instead; nearest that works: 1 [multinode-data]"
        ),
    ),
    "an annotation of the operator's": (
        [role("decode", multinode={**NODES, "annotations": {"dcpdisagg.io/revision": "x", "volcano.sh/queue": "y"}})],
        (
            "spec.decode.multinode.annotations[dcpdisagg.io/revision]: belongs to the operator, as everything under "
            "dcpdisagg.io/; remove it [multinode-annotations]"
        ),
    ),
    "the accelerators of all nodes for each": (
        [role("decode", multinode=NODES), main_container("decode", resources={"limits": {"nvidia.com/gpu": 8}})],
        (
            "spec.decode.template.spec.containers[0].resources.limits[nvidia.com/gpu]: 8 differs from the 4 that "
            "spec.decode.parallelism.tensor 8 / spec.decode.multinode.nodeCount 2 needs; nearest that works: 4, or "
            "leave "
            "it out [gpu-count]"
        ),
    ),
    "a name without room for a group's": (
        [{"metadata": {"name": "n" * 31}}, role("decode", multinode=NODES)],
        (
            "metadata.name: has 31 characters, and the longest derived name adds 33 to it, beyond the 63 that "
            "Kubernetes "
            "allows; at most 30 fit [name-length]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert violations(*changes) == [message]


ALLOWED = {
    "two nodes": [role("decode", multinode=NODES)],
    "a scheduler's annotations": [role("decode", multinode={**NODES, "annotations": {"volcano.sh/queue-name": "a"}})],
    "the accelerators of one node": [
        role("decode", multinode=NODES),
        main_container("decode", resources={"limits": {"nvidia.com/gpu": 4}}),
    ],
    "a name that just fits": [{"metadata": {"name": "n" * 30}}, role("decode", multinode=NODES)],
    "a long name without groups": [{"metadata": {"name": "n" * 46}}],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(changes):
    verdict = report(*changes)
    assert (verdict.violations, verdict.warnings) == ((), ())
