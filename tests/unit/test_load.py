"""From documents to objects: every schema error in the words of a user."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator.api.load import is_ours, load
from tests.support.specimens import SPECIMEN, role, specimen

MESSAGES = {
    "a missing role": ({"spec": {"decode": None}}, "spec.decode: is required"),
    "a misspelt field": (
        role("decode", blockSiz=64),
        "spec.decode.blockSiz: is not a field of spec.decode; did you mean blockSize?",
    ),
    "a field in Python's spelling": (
        role("decode", block_size=64),
        "spec.decode.block_size: is not a field of spec.decode; did you mean blockSize?",
    ),
    "a field that nothing resembles": (
        {"spec": {"kvConnector": {"xyz": 1}}},
        (
            "spec.kvConnector.xyz: is not a field of spec.kvConnector; its fields are type, protocol, delivery, "
            "loadFailurePolicy, rdma, extraConfig"
        ),
    ),
    "zero": (
        role("decode", parallelism={"tensor": 0}),
        "spec.decode.parallelism.tensor: found 0, must be at least 1",
    ),
    "a negative size": (role("decode", blockSize=-64), "spec.decode.blockSize: found -64, must be at least 1"),
    "a huge size": (
        role("decode", parallelism={"tensor": 100000}),
        "spec.decode.parallelism.tensor: found 100000, must be at most 1024",
    ),
    "a number as a string": (
        role("decode", blockSize="64"),
        'spec.decode.blockSize: found a string ("64"), must be a whole number',
    ),
    "a fraction": (
        role("decode", blockSize=6.5),
        "spec.decode.blockSize: found a number (6.5), must be a whole number",
    ),
    "a boolean as a number": (
        role("decode", blockSize=True),
        "spec.decode.blockSize: found a boolean (true), must be a whole number",
    ),
    "a number as a boolean": (
        role("decode", parallelism={"expert": 1}),
        "spec.decode.parallelism.expert: found a whole number (1), must be true or false",
    ),
    "a list as a map": (role("decode", parallelism=[8]), "spec.decode.parallelism: found a list ([8]), must be a map"),
    "a string as a map": ({"spec": {"model": "hf://a"}}, 'spec.model: found a string ("hf://a"), must be a map'),
    "a string as a list": (
        role("decode", extraArgs="--port 1"),
        'spec.decode.extraArgs: found a string ("--port 1"), must be a list',
    ),
    "a number among strings": (
        role("decode", extraArgs=["-tp", 8]),
        "spec.decode.extraArgs[1]: found a whole number (8), must be a string",
    ),
    "nothing among strings": (
        role("decode", extraArgs=[None]),
        "spec.decode.extraArgs[0]: found nothing (null), must be a string",
    ),
    "a word that is none of the choices": (
        {"spec": {"kvConnector": {"protocol": "nvlink"}}},
        'spec.kvConnector.protocol: found "nvlink", must be one of rdma, tcp',
    ),
    "a connector that there is not": (
        {"spec": {"kvConnector": {"type": "lmcache"}}},
        'spec.kvConnector.type: found "lmcache", must be one of mooncake, mooncake-upstream, nixl',
    ),
    "an unknown scheme": (
        {"spec": {"model": {"uri": "s3://bucket/model"}}},
        (
            'spec.model.uri: found "s3://bucket/model", must be hf://REPOSITORY, pvc://CLAIM/PATH or oci://IMAGE, '
            "without "
            "spaces"
        ),
    ),
    "an empty name": ({"spec": {"model": {"servedName": ""}}}, "spec.model.servedName: is empty"),
    "a name of a thousand characters": (
        {"spec": {"model": {"servedName": "x" * 2000}}},
        "spec.model.servedName: has 2000 characters, at most 1024 are allowed",
    ),
    "too many arguments": (
        role("decode", extraArgs=["x"] * 300),
        "spec.decode.extraArgs: has 300 items, at most 256 are allowed",
    ),
    "a percentage above all": (
        {"spec": {"rolloutStrategy": {"maxSurge": "150%"}}},
        (
            'spec.rolloutStrategy.maxSurge: found "150%", must be a whole number from 0 to 1000 or a percentage such '
            "as 25%"
        ),
    ),
    "a negative surge": (
        {"spec": {"rolloutStrategy": {"maxSurge": -1}}},
        "spec.rolloutStrategy.maxSurge: found -1, must be a whole number from 0 to 1000 or a percentage such as 25%",
    ),
    "a name that is no string": (
        {"metadata": {"name": 7}},
        "metadata.name: found a whole number (7), must be a string",
    ),
    "metadata that is no map": ({"metadata": "chat"}, "metadata: found a string, must be a map"),
    "another version": (
        {"apiVersion": "dcpdisagg.io/v2"},
        'apiVersion: found "dcpdisagg.io/v2", must be dcpdisagg.io/v1alpha1',
    ),
    "another kind": ({"kind": "DCPDeployment"}, 'kind: found "DCPDeployment", must be DCPDisaggDeployment'),
    "no spec": ({"spec": None}, "spec: is required: it says which model to run and how"),
}


@pytest.mark.parametrize(("change", "message"), MESSAGES.values(), ids=MESSAGES.keys())
def test_says_what_is_wrong(change, message):
    loaded = load(specimen(change))
    assert loaded.obj is None
    assert [str(finding) for finding in loaded.findings] == [f"{message} [schema]"]


def test_all_errors_are_reported_at_once_in_the_order_of_the_fields():
    change = {"spec": {"image": 1, "decode": {"blockSize": 0, "dtype": ""}, "extra": 1, "rolloutStrategy": []}}
    assert [finding.path for finding in load(specimen(change)).findings] == [
        "spec.image",
        "spec.decode.blockSize",
        "spec.decode.dtype",
        "spec.rolloutStrategy",
        "spec.extra",
    ]


def test_long_values_are_cut():
    loaded = load(specimen(role("decode", blockSize="9" * 5000)))
    assert len(str(loaded.findings[0])) < 200


def test_nulls_count_as_absent_as_on_the_api_server():
    obj = load(specimen(role("decode", blockSize=None, scaling=None, template=None))).obj
    assert obj is not None
    assert obj.spec.decode.block_size == 64
    assert obj.spec.decode.template == {}


def test_nulls_inside_free_form_maps_are_kept():
    obj = load(specimen(role("decode", template={"spec": {"volumes": None}}))).obj
    assert obj is not None
    assert obj.spec.decode.template == {"spec": {"volumes": None}}


OURS = {
    "the kind": ({"apiVersion": "dcpdisagg.io/v1alpha1", "kind": "DCPDisaggDeployment"}, True),
    "another version of it": ({"apiVersion": "dcpdisagg.io/v9", "kind": "DCPDisaggDeployment"}, True),
    "its kind misspelt": ({"apiVersion": "dcpdisagg.io/v1alpha1", "kind": "DCPDisagDeployment"}, True),
    "its group misspelt": ({"apiVersion": "dcpdisag.io/v1alpha1", "kind": "DCPDisaggDeployment"}, True),
    "a ConfigMap": ({"apiVersion": "v1", "kind": "ConfigMap"}, False),
    "a list": ([], False),
    "nothing": (None, False),
}


@pytest.mark.parametrize(("document", "ours"), OURS.values(), ids=OURS.keys())
def test_recognises_what_is_ours(document, ours):
    assert is_ours(document) is ours


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
PATHS = [
    ("apiVersion",),
    ("kind",),
    ("metadata",),
    ("metadata", "name"),
    ("spec",),
    ("spec", "model"),
    ("spec", "model", "geometry"),
    ("spec", "kvConnector", "extraConfig"),
    ("spec", "decode"),
    ("spec", "decode", "parallelism"),
    ("spec", "decode", "extraArgs"),
    ("spec", "decode", "template"),
    ("spec", "rolloutStrategy", "maxSurge"),
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PATHS), JSON)
def test_never_fails_whatever_stands_in_a_field(path, value):
    change = value
    for key in reversed(path):
        change = {key: change}
    loaded = load(specimen(change))
    assert (loaded.obj is None) == bool(loaded.findings)
    for finding in loaded.findings:
        assert finding.path.startswith(("apiVersion", "kind", "metadata", "spec"))
        assert "pydantic" not in finding.message
        assert "Input" not in finding.message


def test_the_specimen_of_these_tests_is_what_it_says():
    assert load(SPECIMEN).findings == ()
