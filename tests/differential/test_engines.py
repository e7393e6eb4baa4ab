"""The rules beside vLLM's own configuration objects and the bundled connector's own mapping, in both directions.

What a pair of engines would say comes from vLLM (`tests/support/vllm_oracle`) and from the connector's proof of its
mapping. Where they and the rules differ on purpose, `tests/support/differences.py` says why.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.differences import MLA, REFUSED, TAKEN, Refused, Taken, compare, sides
from tests.support.profiles import examples
from tests.support.role_pairs import pairs
from tests.support.verdicts import Verdicts, verdicts


@pytest.mark.timeout(1800)  # many examples, on a machine that may be doing other things
@settings(max_examples=examples(dev=300, ci=2000), suppress_health_check=[HealthCheck.too_slow])
@given(pairs())
def test_what_is_taken_starts_and_transfers_and_what_is_refused_does_not(body):
    compare(verdicts(body), REFUSED.values())


@pytest.mark.parametrize("each", TAKEN.values(), ids=TAKEN.keys())
def test_what_admission_can_not_know_is_taken_and_the_engine_refuses_it(each: Taken):
    said = verdicts(each.example)
    assert said.rules == frozenset()
    assert any(re.search(each.says, words, re.S) for words in said.engines.values()), said


@pytest.mark.parametrize("each", REFUSED.values(), ids=REFUSED.keys())
def test_what_this_project_refuses_by_its_own_decision_would_run(each: Refused):
    said = verdicts(each.example)
    assert said.rules == {each.rule}
    assert not said.refused_at_run_time, said


def refuses(stage: str, words: str) -> Callable[[Verdicts], bool]:
    """Return a test of verdicts: some engine refuses at a stage, in words like these."""
    return lambda said: any(re.search(rf"^{stage}: .*{words}", each, re.S) for each in said.engines.values())


#: Where rules and engines have differed before: the smallest object of each kind, the rule that says it now, and who
#: refuses it at run time.
FOUND: dict[str, tuple[dict[str, Any], str, Callable[[Verdicts], bool]]] = {
    "a block that no kernel reads": (
        sides({"blockSize": 24}, {"blockSize": 24}),
        "block-size-kernel",
        refuses("backend", "block size"),
    ),
    "a block of one row, with latent attention": (
        sides({"blockSize": 1}, {"blockSize": 1}, MLA),
        "block-size-kernel",
        refuses("backend", "block size"),
    ),
    "a format of computation that vLLM doesn't know": (
        sides({"dtype": "bfloat17"}, {"dtype": "bfloat17"}),
        "number-format-known",
        refuses("arguments", "invalid choice"),
    ),
    "a KV-cache format that vLLM 0.32 doesn't know": (
        sides({"kvCacheDtype": "fp9"}, {"kvCacheDtype": "fp9"}, version="0.32"),
        "number-format-known",
        refuses("arguments", "invalid choice"),
    ),
    "a KV cache of 16 bits in another format than the computation": (
        sides({"dtype": "float16", "kvCacheDtype": "bfloat16"}, {"dtype": "float16", "kvCacheDtype": "bfloat16"}),
        "number-format-known",
        refuses("config", "incompatible with dtype"),
    ),
    "nvfp4 with latent attention": (
        sides({"kvCacheDtype": "nvfp4"}, {"kvCacheDtype": "nvfp4"}, MLA),
        "number-format-known",
        refuses("config", "nvfp4 KV cache is not supported with MLA"),
    ),
    "tensor ranks that would share KV heads unevenly": (
        sides({"tensor": 3}, {"tensor": 3}, {"attention": "gqa", "attentionHeads": 12, "kvHeads": 2, "layers": 4}),
        "heads-divide-tp",
        refuses("heads", "not divisible"),
    ),
    "ranks of one DCP group with two heads (vLLM starts and attends across them)": (
        sides(
            {"tensor": 12},
            {"tensor": 12, "decodeContext": 4},
            {"attention": "gqa", "attentionHeads": 24, "kvHeads": 2, "layers": 4},
        ),
        "gqa-dcp-replicas",
        lambda said: said.engines == {} and "would mix heads" in said.connector,
    ),
}


@pytest.mark.parametrize(("body", "rule", "at_run_time"), FOUND.values(), ids=FOUND.keys())
def test_a_difference_that_was_found_stays_settled(body, rule, at_run_time):
    said = verdicts(body)
    assert rule in said.rules
    assert at_run_time(said), said
