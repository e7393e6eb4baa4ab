"""The rules for vLLM's own connectors beside the checks that these make of themselves and of one another.

NixlConnector checks its configuration, and its peer's handshake. MooncakeConnector compares lengths of memory only: it
does not know decode context parallelism, and what it lets through can be wrong KV without an error. The rules are
stricter there, each time for a reason in this list.
"""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.differences import GQA, MLA, REFUSED, Refused, compare, sides
from tests.support.profiles import examples
from tests.support.role_pairs import pairs
from tests.support.verdicts import verdicts

_SILENT = "the transfer puts tokens where decode doesn't look for them, and nothing says so"
_ONE_LIMIT = "takes only equal values while a decodeContext is above 1"

STRICTER: dict[str, dict[str, Refused]] = {
    "nixl": {
        "an interleave other than the block size": Refused(
            "connector-takes-pair",
            r"moves whole blocks",
            "the handshake says nothing of the interleave and vLLM skips its own check with this connector; " + _SILENT,
            sides(
                {"decodeContext": 4, "kvCacheInterleaveSize": 16},
                {"decodeContext": 4, "kvCacheInterleaveSize": 16},
                MLA,
                connector="nixl",
            ),
        ),
        "unequal block sizes": Refused(
            "connector-takes-pair",
            r"blockSize: .* takes only equal values",
            "transfers between them are not guarded everywhere (hybrid pulls, host buffers)",
            sides({"blockSize": 64}, {"blockSize": 128}, MLA, connector="nixl"),
        ),
        "pipeline parallelism": Refused(
            "connector-takes-pair",
            r"parallelism\.pipeline: ",
            "pull mode takes it for prefill alone, and this project has not run it",
            sides({}, {"pipeline": 2}, connector="nixl"),
        ),
    },
    "mooncake-upstream": {
        "unequal DCP sizes": Refused(
            "connector-takes-pair",
            _ONE_LIMIT,
            _SILENT,
            sides({}, {"decodeContext": 4}, MLA, connector="mooncake-upstream"),
        ),
        "unequal interleave with DCP": Refused(
            "connector-takes-pair",
            _ONE_LIMIT,
            _SILENT,
            sides(
                {"decodeContext": 4, "kvCacheInterleaveSize": 16},
                {"decodeContext": 4, "kvCacheInterleaveSize": 64},
                MLA,
                connector="mooncake-upstream",
            ),
        ),
        "unequal tensor sizes with DCP": Refused(
            "connector-takes-pair",
            _ONE_LIMIT,
            _SILENT,
            sides({"decodeContext": 2}, {"tensor": 8, "decodeContext": 2}, MLA, connector="mooncake-upstream"),
        ),
        "unequal block sizes with latent attention": Refused(
            "connector-takes-pair",
            r"blockSize: .* takes only equal values",
            "lengths of replicated caches are not compared, and pages are copied one to one; " + _SILENT,
            sides({"blockSize": 64}, {"blockSize": 128}, MLA, connector="mooncake-upstream"),
        ),
    },
}

#: Pairs that a connector itself refuses, and what it says: the sizes that the profiles' limits come from.
OWN_LIMITS = {
    "nixl: a DCP group that is not all of the tensor ranks": (
        sides({}, {"decodeContext": 2}, MLA, connector="nixl"),
        "must be 1 or equal to the NIXL transfer parallel size",
    ),
    "nixl: DCP of grouped-query attention": (
        sides(
            {},
            {"tensor": 4, "decodeContext": 4},
            {"attention": "gqa", "attentionHeads": 8, "kvHeads": 1, "layers": 4},
            connector="nixl",
        ),
        "only supported for MLA",
    ),
    "nixl: tensor sizes that don't divide one another": (
        sides({"tensor": 4}, {"tensor": 6}, {**MLA, "attentionHeads": 12}, connector="nixl"),
        "not divisible",
    ),
    "nixl: replicated heads on more prefill ranks": (
        sides({"tensor": 8}, {"tensor": 4}, GQA, connector="nixl"),
        "AssertionError",
    ),
    "mooncake-upstream: tensor sizes that don't divide one another": (
        sides({"tensor": 4}, {"tensor": 6}, {**MLA, "attentionHeads": 12}, connector="mooncake-upstream"),
        "not divisible",
    ),
    "mooncake-upstream: unequal blocks of heads": (
        sides({"blockSize": 64}, {"blockSize": 128}, GQA, connector="mooncake-upstream"),
        "length",
    ),
}

ENTRIES = [(connector, name) for connector, entries in STRICTER.items() for name in entries]


@pytest.mark.timeout(1800)  # many examples, on a machine that may be doing other things
@pytest.mark.parametrize("connector", STRICTER)
@settings(max_examples=examples(dev=150, ci=400), suppress_health_check=[HealthCheck.too_slow])
@given(body=pairs())
def test_a_connector_of_vllm_is_offered_what_it_takes(connector, body):
    body["spec"]["kvConnector"]["type"] = connector
    body["spec"]["router"] = {"replicas": 0 if connector == "mooncake-upstream" else 1}
    compare(verdicts(body), [*REFUSED.values(), *STRICTER[connector].values()])


@pytest.mark.parametrize(("connector", "name"), ENTRIES)
def test_a_limit_that_a_connector_does_not_check_is_a_rule(connector, name):
    each = STRICTER[connector][name]
    said = verdicts(each.example)
    assert said.rules == {each.rule}
    assert not said.refused_at_run_time, said


@pytest.mark.parametrize(("body", "words"), OWN_LIMITS.values(), ids=OWN_LIMITS.keys())
def test_a_limit_that_a_connector_checks_is_a_rule_too(body, words):
    said = verdicts(body)
    assert "connector-takes-pair" in said.rules
    assert words in said.connector + "".join(said.engines.values()), said
