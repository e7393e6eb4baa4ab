"""Every example of a refusal is refused by the one rule that it shows, and a change that works can be suggested."""

from pathlib import Path

import pytest

from dcp_operator.cli.documents import read_files
from dcp_operator.rules import check_body
from dcp_operator.rules.suggest import suggest

FOLDER = Path("examples/refused")
#: File -> the rule that it is about: one for each family of rules.
RULES = {
    "accelerators-miscounted": "gpu-count",
    "argument-contradicts-a-field": "extra-args-contradict",
    "backend-does-not-shard": "backend-supports-dcp",
    "dcp-does-not-divide-tp": "dcp-divides-tp",
    "grouped-queries-mix-heads": "gqa-dcp-replicas",
    "host-network-in-the-template": "host-ports",
    "kv-formats-differ": "kv-dtype-equal",
    "mooncake-upstream-with-the-router": "router-drives-connector",
    "nixl-shards-part-of-the-ranks": "connector-takes-pair",
    "no-time-to-drain": "grace-covers-drain",
    "nodes-do-not-divide-ranks": "multinode-ranks",
    "privileged-container": "no-privileges",
    "ratio-out-of-reach": "ratio-achievable",
    "rdma-devices-for-tcp": "rdma-devices",
    "two-owners-of-replicas": "replicas-or-scaling",
    "vllm-versions-differ": "image-parity",
    "volume-with-a-revision": "model-uri",
}


def test_every_example_is_looked_at():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_an_example_is_refused_by_its_rule_alone_and_a_change_that_works_is_suggested(name):
    (document,) = read_files([str(FOLDER / f"{name}.yaml")]).documents
    assert {finding.rule for finding in check_body(document.body).violations} == {RULES[name]}
    suggestion = suggest(document.body)
    assert suggestion is not None
    assert len(suggestion.changes) == 1
    assert check_body(suggestion.body).allowed
