"""Rules on attention: in which forms a backend is named, what speculates, and which layers can be sharded."""

import pytest

from tests.support.specimens import MLA, report, role, sizes


def rules(*changes):
    return {finding.rule for finding in report(*changes).violations}


def decode(*arguments, **fields):
    return role("decode", extraArgs=list(arguments), **fields)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--attention-backend", "TRITON_ATTN"],
        ["--attention-backend=triton_attn"],
        ["--attention_backend=FLEX_ATTENTION"],
        ["--attention-config", '{"backend": "TRITON_ATTN"}'],
        ["--attention-config.backend", "TRITON_ATTN"],
        ["-ac.backend=B12X"],
        ["--attention-backend=FLASH_ATTN", "--attention-backend=TRITON_ATTN"],
    ],
    ids=" ".join,
)
def test_a_backend_that_does_not_shard_is_refused_in_whichever_form_it_is_named(arguments):
    assert rules(decode(*arguments)) == {"backend-supports-dcp"}


TAKEN = {
    "it shards": [decode("--attention-backend=FLASH_ATTN")],
    "nothing is known of it": [decode("--attention-backend=CUSTOM")],
    "none is named": [decode("--attention-config={}")],
    "something else is configured": [decode("--attention-config", '{"use_trtllm_attention": true}')],
    "nothing is sharded": [decode("--attention-backend=TRITON_ATTN"), sizes("decode", tensor=4, decodeContext=1)],
    "the last use counts": [decode("--attention-backend=TRITON_ATTN", "--attention-backend=FLASH_ATTN")],
    "it shards single tokens": [MLA, decode("--attention-backend=FLASHINFER_MLA", kvCacheInterleaveSize=1)],
}


@pytest.mark.parametrize("why", TAKEN)
def test_any_other_backend_is_taken(why):
    assert rules(*TAKEN[why]) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
        ["-sc", '{"method": "mtp"}'],
        ["--speculative-config.method=eagle"],
        ["--spec-method", "ngram"],
        ["--spec-tokens=2"],
        ["--speculative-config.method=mtp", "--attention-backend=FLASHMLA"],
    ],
    ids=" ".join,
)
def test_speculation_over_several_ranks_needs_single_tokens(arguments):
    assert rules(MLA, decode(*arguments)) == {"spec-decode-interleave"}
    assert rules(MLA, decode(*arguments, kvCacheInterleaveSize=1)) == set()
    assert rules(MLA, sizes("decode", tensor=8, decodeContext=1), decode(*arguments)) == set()


@pytest.mark.parametrize("backend", ["FLASHMLA_SPARSE", "TOKENSPEED_MLA"])
def test_two_backends_speculate_with_whole_blocks(backend):
    assert rules(MLA, decode("--speculative-config.method=mtp", f"--attention-backend={backend}")) == set()


def test_an_empty_configuration_is_no_speculation():
    assert rules(MLA, decode("--speculative-config={}")) == set()


@pytest.mark.parametrize("layout", ["sliding", "chunked", "linear"])
def test_layers_that_do_not_cache_every_token_are_not_sharded(layout):
    geometry = {"spec": {"model": {"geometry": {"layout": layout}}, "kvConnector": {"type": "nixl"}}}
    assert "dcp-full-attention-only" in rules(geometry)
    assert rules(geometry, sizes("decode", tensor=4, decodeContext=1)) == set()


@pytest.mark.parametrize("layout", ["full", "sparse"])
def test_layers_that_cache_every_token_are(layout):
    assert rules({"spec": {"model": {"geometry": {"layout": layout}}}}) == set()


def test_the_catalogue_says_which_layers_a_known_model_has():
    model = {"spec": {"model": {"uri": "hf://openai/gpt-oss-120b", "geometry": None}}}
    assert "dcp-full-attention-only" in rules(model, sizes("decode", tensor=16, decodeContext=2))


def test_what_an_object_states_goes_before_the_catalogue():
    stated = {"attention": "gqa", "attentionHeads": 64, "kvHeads": 8, "layers": 36, "layout": "full"}
    model = {"spec": {"model": {"uri": "hf://openai/gpt-oss-120b", "geometry": stated}}}
    assert rules(model, sizes("decode", tensor=16, decodeContext=2)) == set()
