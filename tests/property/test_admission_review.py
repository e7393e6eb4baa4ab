"""Whatever is sent to the admission webhook, the answer is a review with words in it, and never an exception."""

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator.admission_review import answer
from tests.support.damage import DAMAGE, REVIEW_DAMAGE, TEXTS, VALUES, WHOLE, damaged
from tests.support.specimens import specimen
from tests.support.webhook_process import review

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_the_object_that_is_damaged_below_is_allowed_as_a_whole():
    assert judged(review(WHOLE))["allowed"]


def judged(body: Any) -> dict[str, Any]:
    """The answer to a review, after the checks that hold for every answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answered = answer(content)
    json.dumps(answered).encode("utf-8")
    assert (answered["apiVersion"], answered["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = answered["response"]
    assert isinstance(response["allowed"], bool)
    if not response["allowed"]:
        assert response["status"]["message"].strip()
        assert response["status"]["code"] in (400, 413, 422)
        assert "Traceback" not in response["status"]["message"]
    assert all(len(warning) <= 256 for warning in response.get("warnings", []))
    return response


@SETTINGS
@given(DAMAGE, st.booleans())
def test_an_object_that_is_damaged_anywhere_gets_an_answer(damage: list, is_update: bool):
    new = damaged(WHOLE, damage)
    response = judged(review(new, WHOLE if is_update else None))
    assert response["uid"] == "a-uid"


@SETTINGS
@given(DAMAGE)
def test_an_old_object_of_any_shape_gets_an_answer(damage: list):
    assert judged(review(WHOLE, damaged(WHOLE, damage)))["uid"] == "a-uid"


@SETTINGS
@given(REVIEW_DAMAGE, VALUES, VALUES)
def test_a_review_that_is_damaged_anywhere_gets_an_answer(damage: list, new: Any, old: Any):
    judged(damaged(review(new, old), damage))


@SETTINGS
@given(VALUES | st.binary(max_size=60))
def test_what_is_no_review_is_refused(body: Any):
    assert judged(body)["allowed"] is False


@SETTINGS
@given(st.lists(TEXTS | st.text(max_size=300), max_size=6))
def test_arguments_of_any_text_get_an_answer(arguments: list[str]):
    judged(review(damaged(WHOLE, [(("spec", "prefill", "extraArgs"), arguments)])))


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def as_bytes(body: dict[str, Any], marker: str, depth: int, kind: str) -> bytes:
    """The review with a value nested as deeply as said at a marker; Python's own encoder gives up long before."""
    opening, closing = ("[", "]") if kind == "list" else ('{"a":', "}")
    return json.dumps(body).replace(f'"{marker}"', opening * depth + "1" + closing * depth).encode()


DEEP = {
    "extraConfig": ("spec", "kvConnector", "extraConfig", "x"),
    "a template": ("spec", "prefill", "template", "spec", "x"),
    "an environment": ("spec", "prefill", "template", "spec", "containers", 0, "env"),
    "a typed field": ("spec", "decode", "blockSize"),
    "an unknown field": ("spec", "x"),
    "metadata": ("metadata", "annotations"),
    "the spec": ("spec",),
    "the model": ("spec", "model"),
}


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize("depth", [50, 200, 330, 480, 700, 950, 5_000, 100_000])
@pytest.mark.parametrize("path", DEEP.values(), ids=DEEP.keys())
def test_nesting_of_any_depth_gets_an_answer(path: tuple, depth: int, kind: str):
    body = review(damaged(WHOLE, [(path, "DEEP")]))
    assert judged(as_bytes(body, "DEEP", depth, kind))["uid"] == "a-uid"
    update = review(damaged(WHOLE, [(path, "DEEP")]), damaged(WHOLE, [(path, "DEEP")]))
    assert judged(as_bytes(update, "DEEP", depth, kind))["uid"] == "a-uid"


LARGE = {
    "an argument of a million characters": [(("spec", "prefill", "extraArgs"), ["--x" + "y" * 1_000_000])],
    "a flag's value of a million characters": [
        (("spec", "prefill", "extraArgs"), ["--max-num-seqs=" + "9" * 1_000_000])
    ],
    "JSON of a million characters": [(("spec", "prefill", "extraArgs"), ["--hf-overrides={" + '"a":1,' * 150_000])],
    "256 arguments of 4096 characters": [(("spec", "prefill", "extraArgs"), ["--x" + "y" * 4000] * 256)],
    "a hundred thousand arguments": [(("spec", "prefill", "extraArgs"), ["--max-num-seqs=4"] * 100_000)],
    "a name of 1.5 million characters": [(("metadata", "name"), "x" * 1_500_000)],
    "forty thousand options": [(("spec", "kvConnector", "extraConfig"), {f"k{n}": n for n in range(40_000)})],
    "thirty thousand variables": [
        (
            ("spec", "prefill", "template", "spec", "containers", 0, "env"),
            [{"name": f"V{n}", "value": "x"} for n in range(30_000)],
        )
    ],
    "ten thousand containers": [
        (
            ("spec", "prefill", "template", "spec", "containers"),
            [{"name": f"c{n}", "image": "x"} for n in range(10_000)],
        )
    ],
    "a hundred thousand unknown fields": [(("spec",), {f"k{n}": 1 for n in range(100_000)})],
    "a number of a thousand digits": [(("spec", "decode", "blockSize"), 10**1000)],
}


@pytest.mark.parametrize("damage", LARGE.values(), ids=LARGE.keys())
def test_the_largest_objects_are_answered_long_before_the_api_server_gives_up(damage: list):
    body = json.dumps(review(damaged(WHOLE, damage))).encode()
    answer(b"{}")
    began = time.process_time()
    judged(body)
    # The API server waits ten seconds; processor time doesn't depend on what else the machine does.
    assert time.process_time() - began < 8


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"operation": "DELETE", "object": None, "oldObject": WHOLE}, True),
        ({"operation": "CONNECT"}, True),
        ({"subResource": "status"}, True),
        ({"subResource": "scale", "object": {"kind": "Scale", "spec": {"replicas": 3}}}, True),
        ({"dryRun": True}, True),
        ({"object": None}, False),
        ({"object": []}, False),
        ({"operation": "UPDATE", "oldObject": None}, True),
        ({"resource": {"group": "apps", "version": "v1", "resource": "deployments"}}, False),
        ({"resource": None}, False),
        ({"userInfo": None, "options": None}, True),
    ],
)
def test_what_is_asked_about_other_things_than_a_spec(fields: dict[str, Any], allowed: bool):
    body = review(specimen())
    body["request"] |= fields
    assert judged(body)["allowed"] is allowed


def test_an_object_of_an_old_version_is_refused_with_the_version_that_is_known():
    response = judged(review({**specimen(), "apiVersion": "dcpdisagg.io/v1alpha0"}))
    assert "apiVersion: found" in response["status"]["message"]
