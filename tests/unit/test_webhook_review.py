"""What admission answers, from the new and the old object alone."""

import copy

import pytest

from dcp_operator.admission import review
from tests.support.objects import owner, spec

BAD = {"parallelism": {"tensor": 3, "decodeContext": 2}, "blockSize": 32, "kvCacheInterleaveSize": 7}


def deleting(body: dict) -> dict:
    result = copy.deepcopy(body)
    result["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return result


def test_a_valid_object_is_taken():
    assert review(owner(), None).refusal is None


def test_every_finding_is_a_line_of_the_refusal():
    refusal = review(owner(decode=BAD), None).refusal
    assert refusal is not None
    rules = [line.rpartition("[")[2].rstrip("]") for line in refusal.splitlines()]
    assert {"dcp-divides-tp", "interleave-divides-block"} <= set(rules)


def test_warnings_come_with_a_refusal_too():
    verdict = review(owner(decode=BAD, model={"uri": "hf://acme/tiny"}), None)
    assert verdict.refusal is not None
    assert any("unknown-model" in warning for warning in verdict.warnings)


def test_a_warning_is_no_longer_than_the_api_server_shows():
    verdict = review(owner(model={"uri": "hf://acme/tiny"}), None)
    assert verdict.refusal is None
    assert all(len(warning) <= 256 for warning in verdict.warnings)


def test_an_update_is_judged_as_a_whole_though_one_role_changed():
    new = owner(prefill={**spec()["prefill"], "kvCacheDtype": "fp8"})
    refusal = review(new, owner()).refusal
    assert refusal is not None
    assert "kv-dtype-equal" in refusal


def test_an_update_that_leaves_the_spec_alone_passes_whatever_the_spec_is():
    old = owner(decode=BAD)
    new = copy.deepcopy(old)
    new["metadata"]["labels"] = {"team": "search"}
    assert review(new, old).refusal is None


def test_an_object_that_is_being_deleted_can_be_edited():
    assert review(deleting(owner(decode=BAD)), owner()).refusal is None


def test_a_deletion_timestamp_at_creation_excuses_nothing():
    assert review(deleting(owner(decode=BAD)), None).refusal is not None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"spec": None},
        {"apiVersion": "dcpdisagg.io/v1alpha1", "kind": "DCPDisaggDeployment", "metadata": {}, "spec": []},
        {"apiVersion": "dcpdisagg.io/v1alpha1", "kind": "DCPDisaggDeployment", "metadata": "x", "spec": {}},
        {**owner(), "spec": {**spec(), "image": 3}},
        {**owner(), "spec": {**spec(), "prefil": {}}},
    ],
)
def test_what_cannot_be_read_is_refused_in_words(body: dict):
    refusal = review(body, None).refusal
    assert refusal is not None
    assert refusal.endswith("[schema]")
