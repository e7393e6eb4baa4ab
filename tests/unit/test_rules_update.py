"""Updates: what an object was stored with is no reason to refuse a change elsewhere, and any other error is."""

import copy

import pytest

from dcp_operator.admission import review
from dcp_operator.rules import RULES, check_body
from tests.support.refusals import REFUSALS
from tests.support.specimens import MLA, main_container, merged, role, sizes, specimen

#: An error that was stored, a change of another field, and a change of a field that the error is about. The last two
#: leave the object with an error of the same rule on the same field.
STORED = {
    "dcp-divides-tp": (
        [MLA, sizes("decode", tensor=8, decodeContext=3)],
        role("decode", replicas=3),
        sizes("decode", tensor=16),
    ),
    "gqa-dcp-replicas": (
        [sizes("decode", tensor=8, decodeContext=4)],
        sizes("prefill", tensor=2),
        {"spec": {"model": {"geometry": {"kvHeads": 8}}}},
    ),
    "heads-divide-tp": ([sizes("prefill", tensor=3)], {"spec": {"image": "x"}}, sizes("prefill", tensor=5)),
    "interleave-divides-block": (
        [role("decode", kvCacheInterleaveSize=48)],
        role("prefill", replicas=9),
        role("decode", blockSize=128),
    ),
    "kv-dtype-equal": (
        [role("decode", kvCacheDtype="fp8")],
        role("decode", dtype="auto"),
        role("prefill", kvCacheDtype="bfloat16"),
    ),
    "connector-takes-pair": (
        [sizes("decode", prefillContext=2)],
        role("prefill", replicas=1),
        sizes("decode", prefillContext=4),
    ),
    "extra-args-contradict": (
        [role("decode", extraArgs=["-tp=4"])],
        role("decode", extraArgs=["-tp=4", "--seed=1"]),
        role("decode", extraArgs=["-tp=2"]),
    ),
    "replicas-or-scaling": (
        [role("decode", scaling={"maxReplicas": 4})],
        role("decode", maxModelLen=32768),
        role("decode", replicas=7),
    ),
    "gpu-count": (
        [main_container("decode", resources={"limits": {"nvidia.com/gpu": 3}})],
        {"spec": {"router": {"replicas": 2}}},
        main_container("decode", resources={"limits": {"nvidia.com/gpu": 5}}),
    ),
}


def errors(body, old):
    report = check_body(body, old=old)
    return {each.rule for each in report.violations}, {each.rule for each in report.inherited}


@pytest.mark.parametrize("rule", STORED)
def test_a_stored_error_does_not_refuse_a_change_of_another_field(rule):
    stored, elsewhere, _ = STORED[rule]
    old = specimen(*stored)
    assert errors(old, None)[0] == {rule}
    refused, inherited = errors(merged(old, elsewhere), old)
    assert refused == set()
    assert inherited == {rule}


@pytest.mark.parametrize("rule", STORED)
def test_a_stored_error_refuses_a_change_of_what_it_is_about(rule):
    stored, _, about = STORED[rule]
    old = specimen(*stored)
    assert rule in errors(merged(old, about), old)[0]


@pytest.mark.parametrize("rule", STORED)
def test_an_error_that_an_update_brings_refuses_it_whichever_role_changed(rule):
    stored, _, _ = STORED[rule]
    assert errors(specimen(*stored), specimen())[0] == {rule}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_object_that_was_stored_with_any_error_can_still_be_scaled(name):
    """The router has nothing to do with any of them, except with the rule about it."""
    old = specimen(*REFUSALS[name])
    new = merged(copy.deepcopy(old), {"spec": {"model": {"servedName": "chat"}}})
    assert errors(new, old)[0] == set()


def test_a_second_error_beside_a_stored_one_is_the_only_one_that_refuses():
    old = specimen(MLA, sizes("decode", tensor=8, decodeContext=3))
    refused, inherited = errors(merged(old, role("prefill", kvCacheDtype="fp8")), old)
    assert refused == {"kv-dtype-equal"}
    assert inherited == {"dcp-divides-tp"}


def test_a_cured_error_is_not_mentioned():
    old = specimen(MLA, sizes("decode", tensor=8, decodeContext=3))
    assert errors(merged(old, sizes("decode", decodeContext=4)), old) == (set(), set())


def test_the_review_says_an_inherited_error_as_a_warning_and_that_nothing_is_applied():
    old = specimen(MLA, sizes("decode", tensor=8, decodeContext=3))
    verdict = review(merged(old, role("decode", replicas=4)), old)
    assert verdict.refusal is None
    assert [text for text in verdict.warnings if "dcp-divides-tp" in text] == [
        (
            "not applied while this is so: spec.decode.parallelism.decodeContext: 3 does not divide "
            "spec.decode.parallelism.tensor 8; nearest that work: 2, 4 [dcp-divides-tp]"
        )
    ]


def test_a_field_that_an_older_schema_had_can_stay_while_others_change():
    old = merged(specimen(), {"spec": {"fast": True}})
    verdict = review(merged(old, role("decode", replicas=4)), old)
    assert verdict.refusal is None
    assert any("spec.fast" in text and text.endswith("[schema]") for text in verdict.warnings)
    assert review(merged(old, {"spec": {"slow": True}}), old).refusal is not None
    assert review(old, None).refusal is not None


def test_a_spec_that_no_pod_can_be_made_from_is_no_deadlock_either():
    old = specimen(*REFUSALS["a list that is none"])
    assert review(merged(old, role("prefill", replicas=4)), old).refusal is None


def test_the_rules_that_need_the_model_are_those_that_the_warning_names():
    from dcp_operator.rules.model import NEED_MODEL

    assert [rule.id for rule in RULES if rule.needs_model and rule.id not in NEED_MODEL] == []
    assert NEED_MODEL.count(",") + 1 == sum(rule.needs_model for rule in RULES)
