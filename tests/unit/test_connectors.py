"""What each connector takes, against the conditions of vLLM's own code written out by hand, over all small sizes."""

import itertools

import pytest

from dcp_operator.connectors import PROFILES, lease_of
from dcp_operator.rules.context import build_context
from dcp_operator.rules.geometry import context_choices
from dcp_operator.rules.transfer import takes_pair
from tests.support.specimens import MLA, loaded, role, sizes

HEADS = 4  # of the specimen's model with grouped queries
MODELS = {"mla": [MLA], "gqa": [{}]}


def sides(attention):
    """Yield (tensor, decodeContext, blockSize, interleave) of every side that is valid by itself."""
    geometry = loaded(*MODELS[attention]).spec.model.geometry
    for tensor in (1, 2, 3, 4, 6, 8, 16):
        for context in context_choices(tensor, geometry):
            for block, interleave in ((16, 16), (32, 32), (32, 16)):
                if context > 1 or interleave == block:
                    yield tensor, context, block, interleave


def divide(one, other):
    return one % other == 0 or other % one == 0


def nixl(attention, prefill, decode):
    """`config/vllm.py` (DCP sizes, MLA) and `_validate_remote_agent_handshake`; equal blocks and I = B are ours."""
    for tensor, context, block, interleave in (prefill, decode):
        if context not in (1, tensor) or (context > 1 and (attention == "gqa" or interleave != block)):
            return False
    if not divide(prefill[0], decode[0]) or not divide(prefill[1], decode[1]):
        return False
    # tp_ratio below 0 on decode, with prefill's heads replicated
    if attention == "gqa" and prefill[0] > decode[0] and prefill[0] > HEADS:
        return False
    return prefill[2] == decode[2]


def upstream(attention, prefill, decode):
    """`_get_tp_ratio` and the comparison of page lengths; it knows nothing of shards, so both sides must be alike."""
    if prefill[1] > 1 or decode[1] > 1:
        return prefill == decode
    return prefill[2] == decode[2] and divide(prefill[0], decode[0])


def bundled(attention, prefill, decode):
    return True


ORACLES = {"mooncake": bundled, "mooncake-upstream": upstream, "nixl": nixl}


def pair(kind, attention, prefill, decode):
    changes = [{"spec": {"kvConnector": {"type": kind}}}, *MODELS[attention]]
    for name, (tensor, context, block, interleave) in (("prefill", prefill), ("decode", decode)):
        changes += [sizes(name, tensor=tensor, decodeContext=context)]
        changes += [role(name, blockSize=block, kvCacheInterleaveSize=interleave)]
    return loaded(*changes)


@pytest.mark.parametrize("attention", MODELS)
@pytest.mark.parametrize("kind", ORACLES)
def test_a_pair_is_taken_exactly_when_the_connectors_own_code_takes_it(kind, attention):
    verdicts = set()
    for prefill, decode in itertools.product(sides(attention), repeat=2):
        taken = not any(takes_pair(build_context(pair(kind, attention, prefill, decode))))
        assert taken == ORACLES[kind](attention, prefill, decode), (prefill, decode)
        verdicts.add(taken)
    assert verdicts == ({True} if kind == "mooncake" else {True, False})


@pytest.mark.parametrize("kind", PROFILES)
def test_no_connector_takes_prefill_context(kind):
    obj = loaded(MLA, {"spec": {"kvConnector": {"type": kind}}}, sizes("prefill", tensor=8, prefillContext=2))
    problems = [problem.path for problem in takes_pair(build_context(obj))]
    assert "spec.prefill.parallelism.prefillContext" in problems


@pytest.mark.parametrize(
    ("kind", "options", "lease_s"),
    [
        ("mooncake", {}, 120.0),
        ("mooncake", {"lease_s": "30"}, 30.0),
        ("mooncake", {"lease_s": []}, None),
        ("mooncake-upstream", {"lease_s": 3}, 480.0),
        ("nixl", {"kv_lease_duration": 45}, 45.0),
        ("nixl", {"kv_lease_duration": -1}, None),
    ],
)
def test_the_lease_is_that_of_the_connector(kind, options, lease_s):
    assert lease_of(PROFILES[kind], options) == lease_s
