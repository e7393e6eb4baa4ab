import json

import pytest

from dcp_operator.api.spec import Spec
from dcp_operator.build.engine_args import engine_args
from dcp_operator.build.model_source import model_source
from dcp_operator.build.stopping import termination_grace_s
from dcp_operator.settings import Role
from tests.support.objects import spec


def args_of(role: Role, **changes) -> list[str]:
    return engine_args("chat", Spec.model_validate(spec(**changes)), role)


def flags(args: list[str]) -> dict[str, str]:
    return dict(arg.split("=", 1) for arg in args if "=" in arg)


def test_the_demo_pair_is_told_its_sizes():
    prefill, decode = flags(args_of(Role.PREFILL)), flags(args_of(Role.DECODE))
    assert prefill["--tensor-parallel-size"] == "1"
    assert decode["--tensor-parallel-size"] == "2"
    assert decode["--decode-context-parallel-size"] == "2"
    assert decode["--cp-kv-cache-interleave-size"] == "32"
    assert prefill["--block-size"] == decode["--block-size"] == "32"
    assert prefill["--max-model-len"] == decode["--max-model-len"] == "1024"


def test_without_context_parallelism_no_interleave_is_given_because_vllm_would_refuse_it():
    prefill = flags(args_of(Role.PREFILL))
    assert "--decode-context-parallel-size" not in prefill
    assert "--cp-kv-cache-interleave-size" not in prefill


def test_both_roles_get_the_connector_with_their_side_of_it():
    configs = [json.loads(flags(args_of(role))["--kv-transfer-config"]) for role in Role]
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    for config in configs:
        assert config["kv_connector"] == "DCPMooncakeConnector"
        assert config["kv_connector_module_path"] == "dcp_connector.connector"
        assert config["kv_load_failure_policy"] == "recompute"
        assert config["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}


def test_extra_config_reaches_the_connector():
    connector = {"protocol": "tcp", "extraConfig": {"lease_s": 30}}
    given = flags(args_of(Role.DECODE, kvConnector=connector))
    extra = json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]
    assert extra == {"lease_s": 30.0, "mooncake_protocol": "tcp"}


#: type -> extraConfig, what vLLM is told: class, and its options.
VLLMS_OWN = {
    "mooncake-upstream": ({"num_workers": 4}, "MooncakeConnector", {"num_workers": 4, "mooncake_protocol": "tcp"}),
    "nixl": ({"kv_lease_duration": 45}, "NixlConnector", {"kv_lease_duration": 45}),
}


@pytest.mark.parametrize("kind", VLLMS_OWN)
def test_both_roles_get_a_connector_of_vllms_own_without_a_module_path(kind: str):
    options, vllm_class, told = VLLMS_OWN[kind]
    connector = {"type": kind, "protocol": "tcp", "extraConfig": options, "loadFailurePolicy": "fail"}
    for role, kv_role in zip(Role, ("kv_producer", "kv_consumer"), strict=True):
        assert json.loads(flags(args_of(role, kvConnector=connector))["--kv-transfer-config"]) == {
            "kv_connector": vllm_class,
            "kv_role": kv_role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": told,
        }


def test_extra_args_come_last_and_unchanged():
    prefill = {"parallelism": {"tensor": 1}, "blockSize": 32, "extraArgs": ["--enforce-eager", "--seed", "7"]}
    assert args_of(Role.PREFILL, prefill=prefill)[-3:] == ["--enforce-eager", "--seed", "7"]


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("dtype", "bfloat16", "--dtype=bfloat16"),
        ("kvCacheDtype", "fp8", "--kv-cache-dtype=fp8"),
        ("maxModelLen", 512, "--max-model-len=512"),
    ],
)
def test_a_typed_field_becomes_its_flag(field: str, value: object, flag: str):
    decode = {"parallelism": {"tensor": 1}, "blockSize": 32, field: value}
    assert flag in args_of(Role.DECODE, decode=decode)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor": 4, "pipeline": 2}, ["--tensor-parallel-size=4", "--pipeline-parallel-size=2"]),
        ({"tensor": 1, "data": 4}, ["--data-parallel-size=4", "--data-parallel-size-local=4"]),
        ({"tensor": 1, "data": 4, "dataLocal": 2}, ["--data-parallel-size=4", "--data-parallel-size-local=2"]),
        ({"tensor": 1, "expert": True}, ["--enable-expert-parallel"]),
        (
            {"tensor": 2, "prefillContext": 2},
            ["--prefill-context-parallel-size=2", "--cp-kv-cache-interleave-size=32"],
        ),
    ],
)
def test_a_parallel_size_becomes_its_flag(sizes: dict, expected: list[str]):
    given = args_of(Role.DECODE, decode={"parallelism": sizes, "blockSize": 32})
    assert set(expected) <= set(given)


def test_sizes_of_one_are_left_to_vllm():
    given = flags(args_of(Role.PREFILL))
    assert not [flag for flag in given if "pipeline" in flag or "data" in flag or "context" in flag]


@pytest.mark.parametrize(
    ("uri", "reference", "volume"),
    [
        ("hf://acme/tiny", "acme/tiny", None),
        ("pvc://claim/a/b/", "/models/a/b", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("pvc://claim", "/models", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("oci://reg/m:1", "/models", {"image": {"reference": "reg/m:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_a_model_uri_becomes_a_name_or_a_folder_on_a_volume(uri: str, reference: str, volume: dict | None):
    source = model_source(Spec.model_validate(spec(model={"uri": uri})).model)
    assert source.reference == reference
    found = None if source.volume is None else {k: v for k, v in source.volume.items() if k != "name"}
    assert found == volume


def test_the_revision_and_the_token_of_a_hub_model_are_passed_on():
    model = {"uri": "hf://acme/tiny", "revision": "v2", "authSecretName": "hub"}
    assert "--revision=v2" in args_of(Role.PREFILL, model=model)
    source = model_source(Spec.model_validate(spec(model=model)).model)
    assert source.env[0]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}


def test_the_served_name_defaults_to_the_objects_name():
    assert flags(args_of(Role.PREFILL))["--served-model-name"] == "chat"
    model = {"uri": "hf://acme/tiny", "servedName": "other"}
    assert flags(args_of(Role.PREFILL, model=model))["--served-model-name"] == "other"


@pytest.mark.parametrize(("lease_s", "grace_s"), [(120.0, 210), (0.5, 91), (float("inf"), 10**9 + 90)])
def test_the_grace_period_covers_drain_and_lease(lease_s: float, grace_s: int):
    connector = {"extraConfig": {"lease_s": lease_s}}
    assert termination_grace_s(Spec.model_validate(spec(kvConnector=connector))) == grace_s


@pytest.mark.parametrize(
    ("connector", "grace_s"),
    [
        ({"type": "mooncake-upstream"}, 60 + 480 + 30),
        ({"type": "nixl"}, 60 + 30 + 30),
        ({"type": "nixl", "extraConfig": {"kv_lease_duration": 45}}, 60 + 45 + 30),
    ],
)
def test_the_grace_period_covers_the_lease_of_the_chosen_connector(connector: dict, grace_s: int):
    assert termination_grace_s(Spec.model_validate(spec(kvConnector=connector))) == grace_s
