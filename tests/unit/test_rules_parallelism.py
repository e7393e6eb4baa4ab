"""Rules on one role's sizes: complete messages, as a user reads them."""

import pytest

from dcp_operator.rules import check_body
from tests.support.specimens import MLA, report, role, sizes, specimen, violations, warnings


def test_the_specimen_is_allowed_without_a_word():
    verdict = report()
    assert (verdict.allowed, verdict.violations, verdict.warnings) == (True, (), ())


REFUSED = {
    "decode context that does not divide tensor": (
        [MLA, sizes("decode", tensor=8, decodeContext=3)],
        (
            "spec.decode.parallelism.decodeContext: 3 does not divide spec.decode.parallelism.tensor 8; nearest that "
            "work: "
            "2, 4 [dcp-divides-tp]"
        ),
    ),
    "decode context above tensor": (
        [MLA, sizes("decode", tensor=8, decodeContext=16)],
        (
            "spec.decode.parallelism.decodeContext: 16 does not divide spec.decode.parallelism.tensor 8; "
            "nearest that works: 8 [dcp-divides-tp]"
        ),
    ),
    "nearest decode contexts suit the heads as well": (
        [sizes("decode", tensor=16, decodeContext=3)],
        (
            "spec.decode.parallelism.decodeContext: 3 does not divide spec.decode.parallelism.tensor 16; "
            "nearest that work: 2, 4 [dcp-divides-tp]"
        ),
    ),
    "nearest decode context where heads forbid all but one": (
        [sizes("decode", tensor=4, decodeContext=3)],
        (
            "spec.decode.parallelism.decodeContext: 3 does not divide spec.decode.parallelism.tensor 4; "
            "nearest that works: 1 [dcp-divides-tp]"
        ),
    ),
    "the rule holds for prefill too": (
        [MLA, sizes("prefill", tensor=4, decodeContext=3)],
        (
            "spec.prefill.parallelism.decodeContext: 3 does not divide spec.prefill.parallelism.tensor "
            "4; nearest that work: 2, 4 [dcp-divides-tp]"
        ),
    ),
    "tensor that does not divide the attention heads": (
        [sizes("prefill", tensor=6)],
        (
            "spec.prefill.parallelism.tensor: 6 does not divide spec.model.geometry.attentionHeads 32; nearest that "
            "work: "
            "4, 8 [heads-divide-tp]"
        ),
    ),
    "tensor above the KV heads and no multiple of them": (
        [
            {"spec": {"model": {"geometry": {"attentionHeads": 48, "kvHeads": 4}}}},
            sizes("prefill", tensor=6),
        ],
        (
            "spec.prefill.parallelism.tensor: 6 is no multiple of spec.model.geometry.kvHeads 4; nearest that work: "
            "4, 8 "
            "[heads-divide-tp]"
        ),
    ),
    "tensor below the KV heads and no divisor of them": (
        [
            {"spec": {"model": {"geometry": {"attentionHeads": 48, "kvHeads": 8}}}},
            sizes("prefill", tensor=3),
            sizes("decode", tensor=16, decodeContext=2),
        ],
        (
            "spec.prefill.parallelism.tensor: 3 does not divide spec.model.geometry.kvHeads 8; nearest that work: 2, 4 "
            "[heads-divide-tp]"
        ),
    ),
    "nearest tensor keeps the decode context possible": (
        [sizes("decode", tensor=12, decodeContext=2)],
        (
            "spec.decode.parallelism.tensor: 12 does not divide spec.model.geometry.attentionHeads 32; nearest that "
            "work: "
            "8, 16 [heads-divide-tp]"
        ),
    ),
    "grouped queries without ranks that share a head": (
        [sizes("decode", tensor=4, decodeContext=2)],
        (
            "spec.decode.parallelism.decodeContext: 2 with spec.decode.parallelism.tensor 4 and "
            "spec.model.geometry.kvHeads "
            "4: a KV head is shared only if tensor is above kvHeads; nearest that work: 1 here, or 8 in "
            "spec.decode.parallelism.tensor [gqa-dcp-replicas]"
        ),
    ),
    "grouped queries with more shards than ranks that share a head": (
        [sizes("decode", tensor=8, decodeContext=4)],
        (
            "spec.decode.parallelism.decodeContext: 4 with spec.decode.parallelism.tensor 8 and "
            "spec.model.geometry.kvHeads "
            "4: 2 ranks share a KV head, and decodeContext must divide that number; nearest that work: 2 here, or 16 "
            "in spec.decode.parallelism.tensor [gqa-dcp-replicas]"
        ),
    ),
    "the case that vLLM misses, tensor 12 and 2 KV heads and decode context 4": (
        [
            {"spec": {"model": {"geometry": {"attentionHeads": 24, "kvHeads": 2}}}},
            sizes("decode", tensor=12, decodeContext=4),
        ],
        (
            "spec.decode.parallelism.decodeContext: 4 with spec.decode.parallelism.tensor 12 and "
            "spec.model.geometry.kvHeads "
            "2: 6 ranks share a KV head, and decodeContext must divide that number; nearest that work: 3, 6 "
            "here, or 8 or 24 in spec.decode.parallelism.tensor [gqa-dcp-replicas]"
        ),
    ),
    "grouped queries whose number per head the shards don't divide": (
        [
            {"spec": {"model": {"geometry": {"attentionHeads": 40, "kvHeads": 8}}}},
            sizes("decode", tensor=16, decodeContext=2),
        ],
        (
            "spec.decode.parallelism.decodeContext: 2 with spec.decode.parallelism.tensor 16 and "
            "spec.model.geometry.kvHeads "
            "8: 5 attention heads share a KV head, and decodeContext must divide that number; nearest that works: 1 "
            "[gqa-dcp-replicas]"
        ),
    ),
    "interleave that does not divide the block": (
        [role("decode", blockSize=64, kvCacheInterleaveSize=48)],
        (
            "spec.decode.kvCacheInterleaveSize: 48 does not divide spec.decode.blockSize 64; nearest that work: 32, 64 "
            "[interleave-divides-block]"
        ),
    ),
    "interleave above the block": (
        [role("decode", blockSize=100, kvCacheInterleaveSize=300)],
        (
            "spec.decode.kvCacheInterleaveSize: 300 does not divide spec.decode.blockSize 100; nearest that works: 100 "
            "[interleave-divides-block]"
        ),
    ),
    "latent attention with more than one KV head": (
        [MLA, {"spec": {"model": {"geometry": {"kvHeads": 16}}}}],
        (
            "spec.model.geometry.kvHeads: 16 with spec.model.geometry.attention mla, which caches one compressed "
            "head for "
            "all attention heads; nearest that works: 1 [geometry-consistent]"
        ),
    ),
    "data local that does not divide data": (
        [sizes("decode", data=4, dataLocal=3)],
        (
            "spec.decode.parallelism.dataLocal: 3 does not divide spec.decode.parallelism.data 4; nearest that works: "
            "4 [data-local-fits-data]"
        ),
    ),
    "prefill context with an impossible decode context": (
        [MLA, sizes("decode", tensor=4, prefillContext=2, decodeContext=3)],
        (
            "spec.decode.parallelism.decodeContext: 3 with spec.decode.parallelism.prefillContext 2 and "
            "spec.decode.parallelism.tensor 4, but it must be 1, prefillContext or tensor x prefillContext; nearest "
            "that work: 2, 8 [pcp-dcp-sizes]"
        ),
    ),
    "prefill context beside data parallelism": (
        [sizes("prefill", prefillContext=2, data=2)],
        (
            "spec.prefill.parallelism.prefillContext: 2 together with spec.prefill.parallelism.data 2, "
            "and the engine takes only one of the two above 1; nearest that work: 1 here, or 1 in "
            "spec.prefill.parallelism.data [pcp-dcp-sizes]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert message in violations(*changes)


WARNED = {
    "an interleave without shards": (
        [role("prefill", kvCacheInterleaveSize=32)],
        (
            "spec.prefill.kvCacheInterleaveSize: 32 does nothing while "
            "spec.prefill.parallelism.decodeContext is 1; leave it out or set decodeContext [interleave-needs-dcp]"
        ),
    ),
    "copies of the cache on decode": (
        [MLA, sizes("decode", tensor=8, decodeContext=1)],
        (
            "spec.decode.parallelism.decodeContext: 1 with spec.decode.parallelism.tensor 8 and 1 KV "
            "head keeps 8 copies of the KV cache; 8 keeps one copy and holds 8 times the tokens in "
            "the same memory [dcp-advice]"
        ),
    ),
    "copies that only part of the ranks can shed": (
        [
            {"spec": {"model": {"geometry": {"attentionHeads": 32, "kvHeads": 16}}}},
            sizes("decode", tensor=32, decodeContext=1),
        ],
        (
            "spec.decode.parallelism.decodeContext: 1 with spec.decode.parallelism.tensor 32 and 16 KV "
            "heads keeps 2 copies of the KV cache; 2 keeps one copy and holds 2 times the tokens in "
            "the same memory [dcp-advice]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), WARNED.values(), ids=WARNED.keys())
def test_warns(changes, message):
    verdict = report(*changes)
    assert verdict.allowed
    assert message in map(str, verdict.warnings)


ALLOWED = {
    "latent attention sharded over all ranks": [MLA, sizes("decode", tensor=8, decodeContext=8)],
    "sizes that don't divide one another between the roles": [
        MLA,
        {"spec": {"model": {"geometry": {"attentionHeads": 24}}}},
        sizes("prefill", tensor=3, decodeContext=3),
        sizes("decode", tensor=8, decodeContext=4),
        role("prefill", blockSize=48),
    ],
    "fewer ranks than KV heads": [sizes("prefill", tensor=2)],
    "an interleave of one token": [role("decode", kvCacheInterleaveSize=1)],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows(changes):
    assert violations(*changes) == []


def test_one_mistake_is_one_finding():
    # A decode context that does not divide tensor breaks the rule on heads too: one message is enough.
    found = violations(sizes("decode", tensor=8, decodeContext=3))
    assert len(found) == 1


def test_no_advice_where_decode_has_no_copies():
    assert warnings(sizes("decode", tensor=4, decodeContext=1)) == []


def test_rules_on_heads_wait_for_the_geometry():
    body = specimen(sizes("decode", tensor=7, decodeContext=7))
    assert not check_body(body).allowed
    del body["spec"]["model"]["geometry"]
    verdict = check_body(body)
    assert verdict.allowed
    assert [finding.rule for finding in verdict.warnings] == ["unknown-model"]
