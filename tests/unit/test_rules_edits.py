"""Changes of an object: the same field on the typed spec and in the document."""

import copy

import pytest

from dcp_operator.api.load import load
from dcp_operator.rules.edits import REMOVED, Fix, changed_body, changed_spec, is_typed, steps, value_at
from tests.support.specimens import loaded, role, specimen

TYPED = {
    "spec.decode.parallelism.decodeContext": 4,
    "spec.prefill.kvCacheInterleaveSize": 16,
    "spec.kvConnector.type": "nixl",
    "spec.rolloutStrategy.maxUnavailable": 1,
    "spec.router.replicas": 0,
    "spec.model.geometry.maxModelLen": 1024,
    "spec.decode.kvCacheDtype": REMOVED,
    "spec.prefill.replicas": REMOVED,
}


@pytest.mark.parametrize("path", TYPED)
def test_a_typed_field_is_changed_alike_on_the_spec_and_in_the_document(path):
    fix = Fix(path, TYPED[path])
    body = specimen(role("decode", kvCacheDtype="fp8"))
    obj = load(changed_body(body, fix)).obj
    assert obj is not None
    assert is_typed(path)
    changed = changed_spec(loaded(role("decode", kvCacheDtype="fp8")).spec, fix)
    assert changed == obj.spec
    assert value_at(changed, path) == (None if fix.value is REMOVED else fix.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("spec.decode.extraArgs[12]", ["spec", "decode", "extraArgs", 12]),
        ("a.limits[nvidia.com/gpu]", ["a", "limits", "nvidia.com/gpu"]),
        ("a.containers[0].env[3].name", ["a", "containers", 0, "env", 3, "name"]),
    ],
)
def test_a_path_has_steps(path, expected):
    assert steps(path) == expected


def test_items_and_keys_of_free_form_parts_can_be_left_out():
    template = {"spec": {"volumes": [{"name": "a"}, {"name": "b"}], "x": {"nvidia.com/gpu": 1, "memory": 2}}}
    body = specimen(role("decode", template=template))
    kept = copy.deepcopy(body)
    path = "spec.decode.template.spec"
    assert changed_body(body, Fix(f"{path}.volumes[0]", REMOVED))["spec"]["decode"]["template"]["spec"]["volumes"] == [
        {"name": "b"}
    ]
    left = changed_body(body, Fix(f"{path}.x[nvidia.com/gpu]", REMOVED))["spec"]["decode"]["template"]["spec"]["x"]
    assert left == {"memory": 2}
    assert body == kept


@pytest.mark.parametrize("path", ["spec.decode.extraArgs[0]", "spec.decode.template.spec.x", "metadata.name"])
def test_what_is_no_typed_field_is_told_apart(path):
    assert not is_typed(path)


def test_a_path_without_a_place_is_an_error_that_can_be_caught():
    with pytest.raises((LookupError, TypeError, AttributeError)):
        changed_body({"spec": {"decode": []}}, Fix("spec.decode.parallelism.tensor", 1))
