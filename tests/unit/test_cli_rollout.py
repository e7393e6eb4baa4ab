"""`dcpctl rollout`: what it says and what it changes, on a cluster that a dictionary stands for."""

import argparse
import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_operator.api.load import load
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context
from dcp_operator.build.history import Kept, build_history, template_state
from dcp_operator.cli.numbers import duration_s
from dcp_operator.cli.problems import CliError
from dcp_operator.cli.rollout import Asked, judge, rollout
from dcp_operator.cli.rollout_states import changes, merge_patch, restored
from dcp_operator.observed import Body
from tests.support.objects import owner
from tests.support.objects import spec as object_spec


def merged(target, patch):
    """Apply a JSON merge patch, as RFC 7386 writes it down."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def spec_of(body: Body) -> Spec:
    obj = load(body).obj
    assert obj is not None
    return obj.spec


class FakeCluster:
    """One object, and the history that its edits leave. `later` are statuses that come one after another."""

    def __init__(self, *edits: dict) -> None:
        self.history: dict[str, Body] = {}
        self.patches: list[tuple[Body, str]] = []
        self.later: list[Body] = []
        for edit in edits or ({},):
            self.edit(edit)

    def edit(self, changed: dict) -> None:
        self.body = owner(**changed)
        self.record()

    def record(self) -> None:
        spec = spec_of(self.body)
        context = Context("chat", "models", spec, "-", uid=self.body["metadata"]["uid"])
        kept = [Kept(each["metadata"]["name"], each["revision"], "abc") for each in self.history.values()]
        for manifest in build_history(context, f"rev{len(self.history)}", kept):
            name = manifest["metadata"]["name"]
            stamp = {"creationTimestamp": f"2026-01-0{len(self.history) + 1}T00:00:00Z"}
            before = self.history.get(name, {"metadata": stamp})
            self.history[name] = {**before, **manifest, "metadata": {**before["metadata"], **manifest["metadata"]}}

    def get(self, kind, namespace, name):
        if (namespace, name) != ("models", "chat"):
            return None
        if self.later:
            self.body = {**self.body, **self.later.pop(0)}
        return copy.deepcopy(self.body)

    def list(self, kind, namespace, label_selector=""):
        assert label_selector == "dcpdisagg.io/name=chat"
        other = {"metadata": {"name": "theirs", "ownerReferences": []}, "revision": 99}
        return [*copy.deepcopy(list(self.history.values())), other], "1"

    def merge(self, kind, namespace, name, patch, manager):
        self.patches.append((patch, manager))
        self.body = merged(self.body, patch)
        return copy.deepcopy(self.body)


def ask(api: FakeCluster, action: str, said: list[str] | None = None, **asked):
    ticks = iter(range(1000))
    return rollout(
        Asked(action, asked.pop("name", "chat"), "models", **asked),
        api,
        (said if said is not None else []).append,
        clock=lambda: float(next(ticks)),
        sleep=lambda _: None,
    )


def status(reason: str, verdict: str = "False", *, ready: str = "False", seen: int = 1, message: str = "words") -> Body:
    conditions = [
        {"type": "Ready", "status": ready, "reason": reason, "message": message},
        {"type": "Progressing", "status": verdict, "reason": reason, "message": message},
    ]
    return {"status": {"observedGeneration": seen, "conditions": conditions}}


NEW_IMAGE = {"image": "acme/engine:2"}
BOTH = {
    "prefill": {**object_spec()["prefill"], "dtype": "bfloat16"},
    "decode": {**object_spec()["decode"], "dtype": "bfloat16"},
}


class TestStatus:
    @pytest.mark.parametrize(
        ("body", "is_over", "is_well"),
        [
            ({}, False, False),
            (status("RolledOut", seen=0), False, False),
            (status("RolledOut"), True, True),
            (status("ScaledToZero"), True, True),
            (status("RollingOut", "True"), False, False),
            (status("CrashLoop"), False, False),
            (status("InvalidSpec"), True, False),
            (status("Paused"), True, False),
            (status("Paused", ready="True"), True, True),
        ],
        ids=[
            "unseen",
            "old news",
            "done",
            "to zero",
            "under way",
            "may heal",
            "refused",
            "held",
            "held, nothing to do",
        ],
    )
    def test_a_rollout_is_judged_by_the_newest_status(self, body, is_over, is_well):
        verdict = judge({**owner(), **body})
        assert (verdict.is_over, verdict.is_well) == (is_over, is_well)

    def test_it_waits_and_says_each_thing_once(self):
        api = FakeCluster()
        rolling = status("RollingOut", "True", message="1 of 2")
        first, last = status("RollingOut", "True", message="0 of 2"), status("RolledOut", message="all")
        api.later = [first, rolling, rolling, last]
        said: list[str] = []
        outcome = ask(api, "status", said)
        assert (outcome.code, outcome.out) == (0, "all\n")
        assert said == ["waiting: 0 of 2", "waiting: 1 of 2"]

    def test_a_wait_that_is_too_long_ends_with_1_and_the_reason(self):
        api = FakeCluster()
        api.body |= status("CrashLoop", message="main: out of memory")
        outcome = ask(api, "status", timeout_s=5.0)
        assert outcome.code == 1
        assert outcome.notes == ("not rolled out after 5 s: main: out of memory",)

    def test_what_can_not_go_on_by_itself_is_not_waited_for(self):
        api = FakeCluster()
        api.body |= status("InvalidSpec", message="the spec is refused")
        outcome = ask(api, "status")
        assert (outcome.code, outcome.notes) == (1, ("not rolled out: the spec is refused",))

    def test_without_watching_it_says_how_it_is(self):
        api = FakeCluster()
        api.body |= status("RollingOut", "True", message="1 of 2")
        outcome = ask(api, "status", watch=False)
        assert (outcome.code, outcome.out) == (0, "1 of 2\n")

    def test_an_object_that_is_not_there_is_an_error_in_words(self):
        with pytest.raises(CliError, match="no DCPDisaggDeployment nope in namespace models"):
            ask(FakeCluster(), "status", name="nope")


class TestHistory:
    def test_each_state_says_what_it_changes_by_role(self):
        decode = {"parallelism": {"tensor": 4, "decodeContext": 2}, "blockSize": 32}
        lines = ask(FakeCluster({}, NEW_IMAGE, {**NEW_IMAGE, "decode": decode}, BOTH), "history").out.splitlines()
        assert lines[0].split() == ["NUMBER", "REVISION", "SINCE", "CHANGED"]
        assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4"]
        assert lines[1].endswith("the first that is kept")
        assert lines[2].endswith("both: image acme/engine:1 -> acme/engine:2")
        assert lines[3].endswith("decode: parallelism.tensor 2 -> 4")
        assert lines[4].startswith("4 (now)")
        assert "both: image acme/engine:2 -> acme/engine:1, dtype - -> bfloat16" in lines[4]
        assert "decode: parallelism.tensor 4 -> 2" in lines[4]

    def test_since_is_when_the_number_was_given(self):
        api = FakeCluster({}, NEW_IMAGE, {})
        again = max(api.history.values(), key=lambda body: body["revision"])
        again["metadata"]["managedFields"] = [
            {"time": "2026-02-02T00:00:00Z", "fieldsV1": {"f:revision": {}}},
            {"time": "2026-03-03T00:00:00Z", "fieldsV1": {"f:metadata": {}}},
        ]
        last = ask(api, "history").out.splitlines()[-1]
        assert last.split()[:4] == ["3", "(now)", "rev2", "2026-02-02T00:00:00Z"]

    def test_one_number_is_printed_as_it_is_stored(self):
        assert "image: acme/engine:1\n" in ask(FakeCluster({}, NEW_IMAGE), "history", number=1).out

    def test_a_number_that_is_not_kept_names_those_that_are(self):
        with pytest.raises(CliError, match="state 7 is not in the history; kept: 1, 2"):
            ask(FakeCluster({}, NEW_IMAGE), "history", number=7)

    def test_an_object_without_a_history_says_so(self):
        api = FakeCluster()
        api.history.clear()
        assert "has no history" in ask(api, "history").notes[0]


class TestUndo:
    def test_it_goes_back_to_the_state_before(self):
        api = FakeCluster({}, NEW_IMAGE)
        outcome = ask(api, "undo")
        assert (outcome.code, outcome.out) == (0, "models/chat goes back to state 1\n")
        assert api.body["spec"]["image"] == "acme/engine:1"
        ((patch, manager),) = api.patches
        assert patch["metadata"] == {"resourceVersion": "1", "uid": "owner-uid"}
        assert manager == "dcpctl"

    def test_it_keeps_numbers_scaling_strategy_and_pause(self):
        kept = {
            "prefill": {**object_spec()["prefill"], "replicas": 5},
            "decode": {
                **{key: value for key, value in object_spec()["decode"].items() if key != "replicas"},
                "scaling": {"minReplicas": 2, "maxReplicas": 8},
            },
            "rolloutStrategy": {"maxSurge": 3, "maxUnavailable": 0},
            "paused": True,
            "router": {"replicas": 4},
            "revisionHistoryLimit": 3,
        }
        api = FakeCluster({}, {**NEW_IMAGE, **kept, "paused": False})
        api.body["spec"]["paused"] = True
        outcome = ask(api, "undo")
        spec = api.body["spec"]
        assert outcome.out == "models/chat goes back to state 1 once spec.paused is false\n"
        assert spec["image"] == "acme/engine:1"
        assert (spec["prefill"]["replicas"], spec["router"]["replicas"], spec["paused"]) == (5, 4, True)
        assert spec["decode"]["scaling"] == {"minReplicas": 2, "maxReplicas": 8}
        assert "replicas" not in spec["decode"]
        assert (spec["rolloutStrategy"]["maxSurge"], spec["revisionHistoryLimit"]) == (3, 3)

    def test_twice_is_forth_and_back(self):
        api = FakeCluster({}, NEW_IMAGE)
        ask(api, "undo")
        api.record()
        ask(api, "undo")
        assert api.body["spec"]["image"] == "acme/engine:2"

    def test_it_goes_to_a_number(self):
        api = FakeCluster({}, NEW_IMAGE, {"image": "acme/engine:3"})
        ask(api, "undo", number=1)
        assert api.body["spec"]["image"] == "acme/engine:1"

    def test_a_field_that_the_state_does_not_have_is_taken_away(self):
        api = FakeCluster({}, BOTH)
        ask(api, "undo")
        assert "dtype" not in api.body["spec"]["decode"]

    def test_a_spec_that_was_never_rolled_out_goes_back_to_the_newest_state(self):
        api = FakeCluster({}, NEW_IMAGE)
        api.body["spec"]["image"] = "acme/engine:refused"
        ask(api, "undo")
        assert api.body["spec"]["image"] == "acme/engine:2"

    @pytest.mark.parametrize(
        ("edits", "number", "words"),
        [(({},), None, "no earlier state is kept"), (({}, NEW_IMAGE), 2, "asks for state 2 already")],
        ids=["no other state", "the present one"],
    )
    def test_where_nothing_is_to_undo_it_says_so_and_changes_nothing(self, edits, number, words):
        api = FakeCluster(*edits)
        outcome = ask(api, "undo", number=number)
        assert outcome.code == 1
        assert "nothing to undo" in outcome.notes[0]
        assert words in outcome.notes[0]
        assert api.patches == []

    def test_a_dry_run_prints_the_patch(self):
        api = FakeCluster({}, NEW_IMAGE)
        outcome = ask(api, "undo", dry_run=True)
        assert json.loads(outcome.out)["spec"]["image"] == "acme/engine:1"
        assert api.patches == []

    def test_a_state_of_another_version_is_refused_in_words(self):
        api = FakeCluster({}, NEW_IMAGE)
        first = min(api.history.values(), key=lambda body: body["revision"])
        first["data"]["spec"]["sparkle"] = 1
        with pytest.raises(CliError, match=r"state 1 was stored by another version .* spec\.sparkle"):
            ask(api, "undo")


class TestHold:
    def test_pause_and_resume_set_the_field(self):
        api = FakeCluster()
        assert ask(api, "pause").out == "models/chat is paused\n"
        assert api.body["spec"]["paused"] is True
        assert ask(api, "resume").out == "models/chat is resumed\n"
        assert api.body["spec"]["paused"] is False

    def test_what_is_so_already_is_said_and_not_written(self):
        api = FakeCluster()
        assert ask(api, "resume").notes == ("models/chat is not paused already",)
        assert api.patches == []


json_values = st.recursive(
    st.integers(0, 3) | st.text(alphabet="ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4)


@given(objects, objects)
def test_a_merge_patch_makes_one_value_the_other(one, other):
    assert merged(one, merge_patch(one, other)) == other


@given(objects)
def test_nothing_is_patched_where_nothing_differs(one):
    assert merge_patch(one, copy.deepcopy(one)) == {}


def test_a_state_that_is_written_back_onto_itself_changes_nothing():
    live = spec_of(owner(**BOTH)).model_dump(by_alias=True, exclude_none=True)
    back = restored(live, template_state(spec_of(owner(**BOTH))))
    assert changes(live, back) == ""
    assert merge_patch(live, back) == {}


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("12", 12), ("0", 0)])
def test_a_duration_is_read_as_kubectl_writes_it(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "m", "-1s", "1 h"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a time such as"):
        duration_s(text)
