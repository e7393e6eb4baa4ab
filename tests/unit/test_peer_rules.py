"""The rules that users of other operators found out at run time: each refused at apply, with a value that works.

Numbers as in the list of what engines and connectors check: R1 to R10.
"""

import json

import pytest
import yaml

from dcp_operator.admission import review
from dcp_operator.cli.main import main
from dcp_operator.rules import check_body
from dcp_operator.rules.suggest import suggest
from tests.support.specimens import MLA, role, sizes, specimen

NIXL = {"spec": {"kvConnector": {"type": "nixl"}}}
WHOLE = sizes("decode", tensor=8, decodeContext=8)

#: Number and what it says -> the object, the rule, and the other field that the message names.
PEERS = {
    "R1 tensor is a multiple of decodeContext": (
        [MLA, sizes("decode", tensor=8, decodeContext=3)],
        "dcp-divides-tp",
        "spec.decode.parallelism.tensor 8",
    ),
    "R2 prefill context allows three sizes of decodeContext": (
        [
            MLA,
            {"spec": {"kvConnector": {"type": "mooncake-upstream"}, "router": {"replicas": 0}}},
            sizes("prefill", tensor=4, prefillContext=2, decodeContext=3),
        ],
        "pcp-dcp-sizes",
        "spec.prefill.parallelism.prefillContext 2",
    ),
    "R3 the interleave divides the block": (
        [role("decode", kvCacheInterleaveSize=48)],
        "interleave-divides-block",
        "spec.decode.blockSize 64",
    ),
    "R4 a connector that moves whole blocks needs the interleave to be one": (
        [MLA, NIXL, WHOLE, role("decode", kvCacheInterleaveSize=32)],
        "connector-takes-pair",
        "spec.decode.blockSize 64",
    ),
    "R5 the shards of prefill and decode fit": (
        [
            {"spec": {"kvConnector": {"type": "mooncake-upstream"}, "router": {"replicas": 0}}},
            MLA,
            sizes("prefill", tensor=8, decodeContext=4),
            sizes("decode", tensor=8, decodeContext=2),
        ],
        "connector-takes-pair",
        "spec.prefill.parallelism.decodeContext 4",
    ),
    "R6 the heads of prefill and decode ranks fit": (
        [NIXL, sizes("prefill", tensor=8), sizes("decode", tensor=4, decodeContext=1)],
        "connector-takes-pair",
        "spec.decode.parallelism.tensor 4",
    ),
    "R7 the blocks of prefill and decode fit": (
        [MLA, NIXL, WHOLE, role("decode", blockSize=32)],
        "connector-takes-pair",
        "spec.prefill.blockSize 64",
    ),
    "R8 with grouped queries the shards divide the ranks of a head": (
        [
            {"spec": {"model": {"geometry": {"attentionHeads": 24, "kvHeads": 2}}}},
            sizes("prefill", tensor=2),
            sizes("decode", tensor=12, decodeContext=4),
        ],
        "gqa-dcp-replicas",
        "spec.decode.parallelism.tensor 12",
    ),
    "R9 speculation needs an interleave of 1": (
        [role("decode", extraArgs=["--speculative-config", '{"method": "mtp"}'])],
        "spec-decode-interleave",
        "spec.decode.kvCacheInterleaveSize 64",
    ),
    "R10 the KV formats are the same": (
        [role("decode", kvCacheDtype="fp8")],
        "kv-dtype-equal",
        "spec.prefill.kvCacheDtype auto",
    ),
}


def refused(body, rule):
    return [finding for finding in check_body(body).violations if finding.rule == rule]


@pytest.mark.parametrize("name", PEERS)
def test_a_mismatch_is_refused_with_both_fields_and_a_value_that_works(name):
    changes, rule, other = PEERS[name]
    body = specimen(*changes)
    finding = refused(body, rule)[0]
    assert other in finding.message
    assert "nearest that work" in finding.message or "no single value" in finding.message
    suggestion = suggest(body)
    assert suggestion is not None
    assert check_body(suggestion.body).allowed


@pytest.mark.parametrize("name", PEERS)
def test_the_webhook_and_the_offline_validator_give_the_same_ids(name, tmp_path, capsys):
    body = specimen(*PEERS[name][0])
    path = tmp_path / "object.yaml"
    path.write_text(yaml.safe_dump(body))
    assert main(["validate", "-f", str(path), "-o", "json"]) == 1
    offline = json.loads(capsys.readouterr().out)
    refusal = review(body, None).refusal
    assert refusal is not None
    assert [each["rule"] for each in offline["violations"]] == [
        line.rpartition("[")[2].rstrip("]") for line in refusal.splitlines()
    ]


@pytest.mark.parametrize("name", PEERS)
def test_a_mismatch_that_an_update_of_one_role_brings_is_refused(name):
    """The merged object is judged, not what changed."""
    changes, rule, _ = PEERS[name]
    new = specimen(*changes)
    spec = new["spec"]
    for changed, other in (("prefill", "decode"), ("decode", "prefill")):
        for before in (specimen()["spec"][changed], spec[other]):
            old = {**new, "spec": {**spec, changed: before}}
            if not refused(old, rule):
                verdict = review(new, old)
                assert verdict.refusal is not None
                assert f"[{rule}]" in verdict.refusal
                return
    raise AssertionError("neither role alone brings the mismatch")
