"""The history of an object: which states are recorded, numbered and kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_operator.build import Context
from dcp_operator.build.history import Kept, build_history, template_state
from tests.support.objects import spec as object_spec
from tests.support.specimens import loaded


def spec_of(**changes):
    return loaded({"spec": {**object_spec(), **changes}}).spec


def context_of(**changes) -> Context:
    return Context("chat", "models", spec_of(**changes), operator_image="acme/operator:1", uid="u-1")


def role_with(role: str, **fields) -> dict:
    kept = {key: value for key, value in object_spec()[role].items() if key not in ("replicas", "scaling")}
    return {role: {**kept, **fields}}


def numbers(manifests) -> dict[str, int]:
    return {manifest["metadata"]["name"]: manifest["revision"] for manifest in manifests}


OUTSIDE = {
    "replicas": role_with("decode", replicas=7),
    "scaling": role_with("decode", scaling={"minReplicas": 1, "maxReplicas": 9}),
    "a disruption budget": role_with("prefill", disruptionBudget={"maxUnavailable": 2}),
    "routers": {"router": {"replicas": 3}},
    "ratio": {"ratio": {"max": "4:1"}},
    "rollout strategy": {"rolloutStrategy": {"maxSurge": 2}},
    "the history's own limit": {"revisionHistoryLimit": 3},
    "a pause": {"paused": True},
    "network policies": {"networkPolicy": {"enabled": False}},
    "the transfer check": {"transferCheck": {"enabled": False}},
}
INSIDE = {
    "the image": {"image": "acme/engine:2"},
    "a sidecar": role_with("decode", template={"spec": {"containers": [{"name": "log", "image": "acme/log:1"}]}}),
    "the router's template": {"router": {"template": {"metadata": {"labels": {"team": "a"}}}}},
    "an argument": role_with("prefill", extraArgs=["--enforce-eager"]),
    "the drain": {"drainTimeoutSeconds": 30},
}


@pytest.mark.parametrize("changes", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_what_is_no_part_of_a_state_makes_no_new_one(changes):
    assert template_state(spec_of(**changes)) == template_state(spec_of(**role_with("decode"), **role_with("prefill")))


@pytest.mark.parametrize("changes", INSIDE.values(), ids=INSIDE.keys())
def test_what_pods_are_made_from_makes_a_new_state(changes):
    assert template_state(spec_of(**changes)) != template_state(spec_of())


def test_a_field_that_has_its_default_is_no_part_of_a_state():
    """An upgrade that adds a field makes no state, and neither does writing a default out."""
    explicit = spec_of(drainTimeoutSeconds=60, kvConnector={**object_spec().get("kvConnector", {}), "type": "mooncake"})
    assert template_state(explicit) == template_state(spec_of())


def test_the_first_state_has_number_1_and_holds_the_spec():
    (manifest,) = build_history(context_of(), "abc", [])
    assert manifest["revision"] == 1
    assert manifest["data"] == {"spec": template_state(spec_of())}
    assert manifest["metadata"]["labels"]["dcpdisagg.io/revision"] == "abc"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_the_same_state_keeps_its_number():
    (first,) = build_history(context_of(), "abc", [])
    known = [Kept(first["metadata"]["name"], 4, "abc")]
    assert numbers(build_history(context_of(), "abc", known)) == {first["metadata"]["name"]: 4}


def test_going_back_gives_the_earlier_state_the_newest_number():
    (one,), (two,) = build_history(context_of(), "abc", []), build_history(context_of(image="acme/engine:2"), "def", [])
    known = [Kept(one["metadata"]["name"], 1, "abc"), Kept(two["metadata"]["name"], 2, "def")]
    back = build_history(context_of(), "abc", known)
    assert numbers(back) == {two["metadata"]["name"]: 2, one["metadata"]["name"]: 3}


def test_an_earlier_state_keeps_its_pair_revision_and_is_not_written_again():
    (two,) = build_history(context_of(image="acme/engine:2"), "def", [])
    earlier = build_history(context_of(), "abc", [Kept(two["metadata"]["name"], 2, "def")])[0]
    assert earlier["metadata"]["labels"]["dcpdisagg.io/revision"] == "def"
    assert "data" not in earlier


def test_a_pause_records_nothing_and_takes_nothing():
    known = [Kept("chat-1", 1, "abc"), Kept("chat-2", 2, "def")]
    assert numbers(build_history(context_of(paused=True, revisionHistoryLimit=0), "x", known)) == {
        "chat-1": 1,
        "chat-2": 2,
    }


@given(
    st.lists(st.integers(0, 5), max_size=25),
    st.integers(0, 4),
)
def test_after_any_edits_the_newest_states_are_kept_in_their_order(edits: list[int], limit: int):
    """States as a list of images, beside a history that is applied edit by edit."""
    known: list[Kept] = []
    order: list[int] = []
    for edit in edits:
        context = context_of(image=f"acme/engine:{edit}", revisionHistoryLimit=limit)
        manifests = build_history(context, f"r{edit}", known)
        known = [
            Kept(each["metadata"]["name"], each["revision"], each["metadata"]["labels"]["dcpdisagg.io/revision"])
            for each in manifests
        ]
        order = [*(image for image in order if image != edit), edit][-limit - 1 :]
        kept = sorted(known, key=lambda each: each.number)
        assert [each.revision for each in kept] == [f"r{image}" for image in order]
        assert len({each.number for each in kept}) == len(kept)
