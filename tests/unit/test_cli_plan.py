"""dcpctl plan: legal sizes, how much KV cache they hold, and the object for a choice."""

import json
import re

import pytest
import yaml

from dcp_operator.catalogue import builtin
from dcp_operator.cli.plan import Asked, choices, interleaves, plan, size_of
from dcp_operator.cli.problems import CliError
from dcp_operator.kv_size import KvSize, bytes_per_token
from dcp_operator.rules import check_body
from dcp_operator.settings import Role

MLA = {"model": "deepseek-ai/DeepSeek-V3", "weights": "641GiB", "gpu_memory": "141GB", "context": 131072}
GQA = {"model": "Qwen/Qwen3-235B-A22B", "weights": "438GiB", "gpu_memory": "141GB", "context": 32768}


def asked(**words) -> Asked:
    defaults = {
        "gpus_per_node": 8,
        "reserve": "4GiB",
        "utilization": 0.92,
        "block_size": 64,
        "kv_cache_dtype": "auto",
        "role": "both",
        "choose": None,
        "image": "vllm/vllm-openai:v0.33.0",
        "output": "text",
    }
    return Asked(**{**defaults, **words})


def facts(name: str):
    found = builtin().lookup(name)
    assert found is not None
    return found


class TestArithmetic:
    def test_bytes_of_a_token_are_those_of_the_heads_that_a_rank_keeps(self):
        grouped = facts("Qwen/Qwen3-235B-A22B")  # 94 layers, 4 KV heads of 128
        assert bytes_per_token(grouped, 1, 2) == 94 * 4 * 2 * 128 * 2
        assert bytes_per_token(grouped, 4, 2) == 94 * 1 * 2 * 128 * 2
        assert bytes_per_token(grouped, 8, 2) == bytes_per_token(grouped, 4, 2)
        assert bytes_per_token(grouped, 2, 1) == 94 * 2 * 2 * 128

    def test_latent_attention_keeps_one_vector_on_every_rank(self):
        latent = facts("deepseek-ai/DeepSeek-V3")  # 61 layers, 512 + 64
        assert {bytes_per_token(latent, tensor, 2) for tensor in (1, 2, 8)} == {61 * 576 * 2}

    @pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "Qwen/Qwen3.5-27B", "deepseek-ai/DeepSeek-V3.2"])
    def test_models_whose_layers_are_not_alike_are_not_reckoned(self, name: str):
        with pytest.raises(ValueError, match="its layers are"):
            bytes_per_token(facts(name), 1, 2)

    def test_a_block_of_a_rank_holds_its_own_tokens_only(self):
        size = KvSize(bytes_per_token=100, block_size=16, decode_context=4, available_bytes=16 * 100 * 10 + 1599)
        assert (size.blocks, size.tokens) == (10, 10 * 16 * 4)
        assert size.blocks_for(65) == 2  # 17 tokens on the first rank
        assert size.blocks_for(64) == 1
        assert size.requests(65) == 5.0

    def test_memory_that_is_not_there_holds_nothing(self):
        assert KvSize(100, 16, 1, -5).tokens == 0


class TestChoices:
    def test_decode_is_best_where_a_node_holds_most(self):
        found = choices(asked(**GQA), facts(GQA["model"]), Role.DECODE)
        assert [(choice.tensor, choice.decode_context) for choice in found] == [(8, 2), (8, 1), (4, 1)]
        assert found[0].gain == pytest.approx(2.0, abs=0.01)
        held = [choice.tokens_per_node for choice in found]
        assert held == sorted(held, reverse=True)

    def test_prefill_is_best_without_decode_context(self):
        found = choices(asked(**MLA), facts(MLA["model"]), Role.PREFILL)
        assert [choice.decode_context for choice in found] == [1, 2, 4, 8]

    def test_only_sizes_that_the_rules_take_are_listed(self):
        for name, tensors in (("Qwen/Qwen3-235B-A22B", {1, 2, 4, 8}), ("microsoft/phi-4", {1, 2})):
            found = choices(
                asked(**{**GQA, "model": name, "weights": "1GiB", "context": 1024}), facts(name), Role.DECODE
            )
            assert {choice.tensor for choice in found} == tensors

    def test_what_cannot_hold_one_sequence_is_left_out(self):
        found = choices(asked(**{**GQA, "context": 200_000}), facts(GQA["model"]), Role.DECODE)
        assert (4, 1) not in [(choice.tensor, choice.decode_context) for choice in found]

    def test_every_choice_is_an_object_that_the_rules_take(self):
        for words in (MLA, GQA):
            rows = len(choices(asked(**words), facts(words["model"]), Role.DECODE))
            for decode in range(1, rows + 1):
                for prefill in range(1, rows + 1):
                    outcome = plan(asked(**words, choose=f"{prefill},{decode}"))
                    assert outcome.code == 0
                    body = yaml.safe_load(outcome.out)
                    report = check_body(body)
                    assert report.allowed
                    assert {finding.rule for finding in report.warnings} <= {"dcp-advice"}

    @pytest.mark.parametrize("words", [MLA, GQA], ids=["latent", "grouped"])
    def test_the_best_sizes_are_an_object_of_which_there_is_nothing_to_say(self, words: dict):
        outcome = plan(asked(**words, choose="1"))
        assert outcome.notes == ()
        report = check_body(yaml.safe_load(outcome.out))
        assert (report.violations, report.warnings) == ((), ())

    def test_a_quantized_cache_holds_twice_as_much(self):
        plain = choices(asked(**MLA), facts(MLA["model"]), Role.DECODE)[0]
        small = choices(asked(**MLA, kv_cache_dtype="fp8"), facts(MLA["model"]), Role.DECODE)[0]
        assert small.size.tokens == pytest.approx(2 * plain.size.tokens, rel=0.001)

    def test_the_interleave_that_moves_whole_blocks_comes_first(self):
        assert interleaves(32) == [32, 16, 8, 4, 2, 1]


class TestOutput:
    def test_the_table_numbers_rows_and_shows_the_gain(self):
        outcome = plan(asked(**MLA))
        lines = outcome.out.splitlines()
        first = lines[lines.index("decode, the best first:") + 2]
        assert re.fullmatch(r"1 +8 +8 +70272 +\d+ +\d+ +8\.00x +\d+\.\d", first)
        assert any(
            line.startswith("kvCacheInterleaveSize with decodeContext above 1: 64 moves whole") for line in lines
        )

    def test_json_holds_the_same_for_programs(self):
        outcome = plan(asked(**MLA, output="json", role="decode"))
        found = json.loads(outcome.out)
        assert list(found) == ["decode"]
        assert found["decode"][0]["kvBytesPerTokenAndGpu"] == 70272
        assert found["decode"][0]["kvCacheInterleaveSizes"] == [64, 32, 16, 8, 4, 2, 1]
        assert found["decode"][-1]["kvCacheInterleaveSizes"] == []

    def test_the_object_states_what_was_chosen(self):
        body = yaml.safe_load(plan(asked(**MLA, choose="1", kv_cache_dtype="fp8")).out)
        assert body["metadata"]["name"] == "deepseek-v3"
        assert body["spec"]["kvConnector"] == {"protocol": "tcp"}
        assert body["spec"]["decode"]["parallelism"] == {"tensor": 8, "decodeContext": 8}
        assert body["spec"]["prefill"]["parallelism"] == {"tensor": 8}
        assert body["spec"]["decode"]["maxModelLen"] == 131072
        assert body["spec"]["prefill"]["kvCacheDtype"] == body["spec"]["decode"]["kvCacheDtype"] == "fp8"

    @pytest.mark.parametrize(
        ("text", "size"), [("80GiB", 80 << 30), ("80Gi", 80 << 30), ("141GB", 141 * 10**9), ("1.5T", 1.5e12)]
    )
    def test_sizes_are_read_as_people_write_them(self, text: str, size: float):
        assert size_of(text) == size


WRONG = {
    "an unknown model": (
        {"model": "acme/big"},
        "the catalogue has no model acme/big; put the numbers of",
    ),
    "a model of other layers": (
        {"model": "openai/gpt-oss-20b"},
        "openai/gpt-oss-20b can't be planned: its layers are sliding",
    ),
    "a context beyond the model": (
        {"context": 200_000},
        "--context 200000 is above what deepseek-ai/DeepSeek-V3 supports",
    ),
    "a size without sense": ({"gpu_memory": "lots"}, "'lots' is no size; write it as 80GiB or 141GB"),
    "memory that is too small": ({"gpu_memory": "40GiB"}, "no legal choice holds one sequence of 131072 tokens"),
    "a row that is not there": ({"choose": "9"}, "--choose 9: decode has the rows 1 to 4"),
    "no row": ({"choose": "best"}, "--choose best: write the number of decode's row, or PREFILL,DECODE such as 1,2"),
    "a choice of one role": ({"choose": "1", "role": "decode"}, "--choose prints an object of both roles"),
}


@pytest.mark.parametrize(("words", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_planned_is_a_sentence(words: dict, sentence: str):
    with pytest.raises(CliError) as error:
        plan(asked(**{**MLA, **words}))
    assert str(error.value).startswith(sentence)
